"""Attention of our own over vLLM's backends: packed rows, and what reads vLLM's caches."""
