"""Errors a user can cause."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting the user gave is wrong; the message is one line: key, accepted, remedy."""
