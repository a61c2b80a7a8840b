"""The folder that goes on PYTHONPATH: modules SGLang imports and that have no build here."""
