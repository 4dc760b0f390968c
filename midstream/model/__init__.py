"""Model folders, tokenizers, and the conversion of GGUF files to folders."""
