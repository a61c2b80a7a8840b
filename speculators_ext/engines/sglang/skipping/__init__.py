"""Drafting through the target's own layers, some of them left out, on its own KV pool."""
