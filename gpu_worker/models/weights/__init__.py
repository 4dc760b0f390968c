"""Weights: from files to what a model computes with."""
