"""Objectives for times that clients notice, such as `p95_ttft=500ms`, and whether runs meet them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from scheduler.replay.changes import duration_ns
from scheduler.replay.measures import Measures

_NS_PER_MS = 1e6
_FORM = re.compile(r"p(\d{1,2}(?:\.\d+)?)_(ttft|itl|e2e)=(.+)")


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit for a percentile.

    Attributes:
        percentile: Between 0 and 100.
        name: `ttft`, the time to the first token; `itl`, the time between two tokens of a sequence; or `e2e`, the time
            from arrival to end.
    """

    percentile: float
    name: str
    limit_ns: int

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Return the objective that `p95_ttft=500ms` describes. Raises ValueError if it has another form."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not pNN_NAME=TIME, such as p95_ttft=500ms; names are ttft, itl and e2e")
        return cls(float(match[1]), match[2], duration_ns(match[3]))

    def value_ns(self, measures: Measures) -> float:
        """Return the percentile of a run."""
        return measures.percentile_ns(self.name, self.percentile / 100)

    def is_met(self, measures: Measures) -> bool:
        return self.value_ns(measures) <= self.limit_ns

    def __str__(self) -> str:
        return f"p{self.percentile:g}_{self.name}"


def objectives_table(objectives: Sequence[Objective], columns: Mapping[str, Measures]) -> Table:
    """Return a table with a row per objective and a column per run."""
    result = Table(box=None)
    for title in ("objective, ms", "limit", *columns):
        result.add_column(title, justify="left" if title.startswith("objective") else "right", no_wrap=True)
    for objective in objectives:
        cells = [
            f"{objective.value_ns(measures) / _NS_PER_MS:.1f} {'met' if objective.is_met(measures) else 'missed'}"
            for measures in columns.values()
        ]
        result.add_row(str(objective), f"{objective.limit_ns / _NS_PER_MS:g}", *cells)
    return result
