"""Protobuf definitions (the specification) and the code generated from them."""
