"""Midstream: LLM inference over gRPC that loses no token when any process dies mid-stream."""

__version__ = "0.1.0"
