"""Drafting with a head: a small model of vLLM's that reads the target's hidden states."""
