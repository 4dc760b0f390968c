"""Speculative decoding: proposing and verifying draft tokens."""
