"""Parsers for tool calls and reasoning in a model's text: one incremental machine, a file per format, and a table of
models.

A parser is fed one sequence's text in order. The events so far depend only on the text so far, not on how it was split,
so that a stream can be resumed anywhere by feeding the text again.
"""
