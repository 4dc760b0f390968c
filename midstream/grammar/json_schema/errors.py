"""The errors of schemas that cannot be enforced."""

from __future__ import annotations


class SchemaError(Exception):
    """The schema is invalid, or cannot be enforced; the message names the keyword and where it is."""


class UnenforceableError(SchemaError):
    """The schema is valid, but no grammar can express all of it."""
