"""``reasoning_step`` on stock vLLM: a small model writes whole steps, which the target judges."""
