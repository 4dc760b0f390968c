"""Embeddings of OpenAI, and scores and reranking as vLLM, Cohere and Jina have them."""
