"""Adapters that requests bring along: low-rank pairs, and embeddings of virtual tokens."""
