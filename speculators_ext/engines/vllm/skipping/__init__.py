"""Drafting with the target's own layers, some left out, on the target's own KV cache."""
