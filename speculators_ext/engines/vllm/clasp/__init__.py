"""``clasp`` on stock vLLM: the target drafts for itself with some of its layers skipped."""
