"""Conversion of model files into model folders."""
