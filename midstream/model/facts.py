"""What `midstream check` reports about a model, as the services that load it find out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Use(StrEnum):
    """What becomes of a file or a setting; a model with a REFUSED one cannot be served as it is."""

    USED = "used"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about a part of a model.

    Attributes:
        part: A file, a setting as FILE: NAME, or a property such as `end ids`.
        text: What the part contributes, or why it is ignored or refused.
    """

    part: str
    use: Use
    text: str


def print_facts(facts: Iterable[Fact]) -> None:
    """Print facts as JSON, one per line, for `read_facts` in another process."""
    for fact in facts:
        print(json.dumps(asdict(fact)))


def read_facts(text: str) -> list[Fact]:
    """Return the facts that `print_facts` printed."""
    return [Fact(item["part"], Use(item["use"]), item["text"]) for item in map(json.loads, text.splitlines())]
