"""A test bed that runs stock SGLang on a machine without a GPU; never active where one is."""
