"""Model folders, tokenizers, and how a GGUF file becomes a folder."""
