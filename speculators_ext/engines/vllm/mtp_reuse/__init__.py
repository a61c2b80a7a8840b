"""``mtp_reuse`` on vLLM: the target's own MTP module drafts, for as many steps as pay."""
