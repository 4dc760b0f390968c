"""Adapters of requests: LoRA weights and prompt-tuning tables."""
