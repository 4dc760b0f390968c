"""Grammars for guided decoding, compiled and matched in a separate process.

A guide (JSON schema, regular expression, grammar) is untrusted input, compiled by a native library; the separate
process isolates services from both. `process` is the services' side, `child` is the program that they start with memory
and time limits, and `messages` is the protocol between them. `validation_child` is another such program, which checks
finished outputs of schemas that grammars do not enforce completely.
"""
