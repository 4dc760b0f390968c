"""Tool calls and reasoning in a model's text: one incremental machine, a file per format, and a table of models.

A parser is fed one sequence's text in order. The events that it has given so far depend on the text so far alone, not
on how it was cut, so that a stream is resumed anywhere by feeding the text again.
"""
