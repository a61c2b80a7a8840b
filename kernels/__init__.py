"""Triton kernels, each with its torch reference. No engine, no proposer is imported here."""
