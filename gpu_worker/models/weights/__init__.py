"""Reads weight files and converts their tensors to the formats that decoders use."""
