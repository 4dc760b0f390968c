"""OpenAI's HTTP API, with vLLM's extensions."""
