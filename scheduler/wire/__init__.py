"""Conversion between protobuf messages and the types of the core."""
