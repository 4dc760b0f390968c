"""Detokenizers turn tokens into text and find stop words."""
