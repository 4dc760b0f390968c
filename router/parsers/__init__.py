"""Parsers for tool calls and reasoning in a model's text: an incremental parsing machine, one file per format, and a
table of models.

A parser is fed one sequence's text in order. The events depend only on the text so far, not on how it was split, so
that a stream can be resumed at any point by feeding the text again.
"""
