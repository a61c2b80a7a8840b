"""Answers the import statements of SGLang and transformers, which text models never follow up.

The real package has no build for every torch, and one that does not match breaks transformers.
"""

__version__ = "0.0.0"
