"""Speculative-decoding methods for stock vLLM and SGLang; see README.md for the map."""

__all__ = ["__version__"]

__version__ = "0.1.0"
