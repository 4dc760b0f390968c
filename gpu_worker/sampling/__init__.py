"""From logits to tokens: logits processors, grammars, sampling, and additional outputs of rows."""
