"""One model on several ranks: which part each holds, and how they work together."""
