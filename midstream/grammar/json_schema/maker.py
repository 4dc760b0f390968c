"""What the rules of arrays and objects need from the maker of all rules."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from midstream.grammar.json_schema.document import Document
from midstream.grammar.json_schema.grammar import Name, Rules, Sequence, Value
from midstream.grammar.json_schema.style import Style


class Maker(Protocol):
    """Makes the rules of the values of a schema.

    Attributes:
        document: The schema.
        style: How JSON is formatted.
        rules: The rules so far, by name.
    """

    document: Document
    style: Style
    rules: Rules

    def value(self, schemas: Items[object]) -> Value:
        """Return the terminal of the values that match all of `schemas`, or their rule, which is made later."""

    def add(self, sequences: list[Sequence]) -> Name:
        """Add a rule."""
