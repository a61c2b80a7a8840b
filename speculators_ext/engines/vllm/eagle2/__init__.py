"""``eagle2`` on stock vLLM: draft trees grown by an EAGLE head, verified in one target forward."""
