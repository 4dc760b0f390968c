"""Midstream: LLM inference over gRPC that loses no token when any part dies mid-stream."""

__version__ = "0.1.0"
