"""Presets: measured method settings for known targets, as data."""
