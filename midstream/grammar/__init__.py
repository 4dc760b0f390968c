"""Guided decoding grammars, compiled and matched in a separate process.

A guide (JSON schema, regular expression, grammar) comes from a client and is compiled by a library: both are kept away
from the services. `process` is the side of a service, `child` the program that it starts, with limits of memory and
time; `messages` is what they say to each other.
"""
