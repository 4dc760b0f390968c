"""Receipts: signed statements of what was asked and answered (protos/receipts.proto)."""
