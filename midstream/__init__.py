"""Midstream: LLM inference over gRPC that loses no token when a process dies mid-stream."""

__version__ = "0.2.0"
