"""Model folders, tokenizers, and the conversion of GGUF files into folders."""
