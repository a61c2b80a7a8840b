"""``REASONING_STEP`` on stock SGLang: a small model writes whole steps, which the target judges."""
