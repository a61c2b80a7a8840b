"""Nothing in here: the module is imported, its functions are for images."""
