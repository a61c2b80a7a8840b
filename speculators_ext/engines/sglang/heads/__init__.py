"""What methods share that draft with a head of SGLang's: a round, its model and its attention."""
