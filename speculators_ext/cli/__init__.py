"""The console script `speculators-ext`. Importing it loads neither torch nor an engine."""

from __future__ import annotations

from speculators_ext.cli.app import app

__all__ = ["app"]
