"""Draft trees through vLLM's scheduler, attention, sampler and cache, whoever drafts them."""
