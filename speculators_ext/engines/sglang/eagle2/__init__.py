"""EAGLE-2 on SGLang: a head drafts trees that grow where it is confident."""
