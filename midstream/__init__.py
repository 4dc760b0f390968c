"""Midstream: LLM inference over gRPC in which any part may die mid-stream and no token is lost."""

__version__ = "0.1.0"
