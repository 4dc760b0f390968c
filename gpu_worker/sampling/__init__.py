"""From logits to tokens: logits processors, grammars, sampling, and what a row reports beside its token."""
