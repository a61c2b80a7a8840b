"""What every test shares: property tests draw the same examples each time and have no deadline."""

from __future__ import annotations

from hypothesis import settings

# A deadline measures the machine's load, not the code; a run must fail or pass again alike.
settings.register_profile("speculators-ext", deadline=None, derandomize=True)
settings.load_profile("speculators-ext")
