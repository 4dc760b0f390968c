"""Adapters that requests use: LoRA weights and prompt-tuning tables."""
