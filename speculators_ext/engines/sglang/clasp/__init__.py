"""CLaSp on SGLang: the target drafts for itself, some of its layers skipped."""
