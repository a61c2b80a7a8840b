"""``reasoning_step`` on stock vLLM: whole steps, which the target judges."""
