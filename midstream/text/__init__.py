"""Text from tokens, as a client receives it: incremental decoding and stop words."""
