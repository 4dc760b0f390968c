"""The error of a schema that cannot be enforced."""

from __future__ import annotations


class SchemaError(Exception):
    """The schema is invalid, or cannot be enforced; the message names the keyword and where it is."""
