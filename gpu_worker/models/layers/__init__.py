"""Pieces that models are built of."""
