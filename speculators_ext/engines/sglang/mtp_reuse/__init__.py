"""MTP reuse on SGLang: the target's own multi-token-prediction module, run again and again."""
