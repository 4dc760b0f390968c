"""From logits to tokens: logits processors, grammars, sampling, and the additional outputs of rows."""
