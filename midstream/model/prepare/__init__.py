"""Conversion of model files to model folders."""
