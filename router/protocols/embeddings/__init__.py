"""OpenAI's embeddings API, and the scoring and reranking APIs of vLLM, Cohere and Jina."""
