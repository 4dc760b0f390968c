"""The table of measurements and their limits."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; `limit` and `is_within` are empty if there is no limit."""

    name: str
    measured: str
    limit: str = ""
    is_within: bool | None = None


@dataclass(slots=True)
class Report:
    """Collects rows, prints each immediately, and tracks the remaining time.

    Attributes:
        figures: Numbers that later parts need: the device's bytes and operations per second.
        file: File to which rows are appended as JSON, with the figures known so far.
    """

    budget_s: float
    rows: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    figures: dict[str, float] = field(default_factory=dict)
    file: Path | None = None

    @property
    def seconds_left(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)

    @property
    def num_missed(self) -> int:
        return sum(row.is_within is False for row in self.rows)

    def note(self, name: str, measured: str) -> None:
        """Add a measurement or fact without a limit."""
        self._add(Row(name, measured))

    def share(self, name: str, value: float, least: float | None, detail: str = "") -> None:
        """Add a fraction that should reach a limit, if there is one; NaN means unknown."""
        measured = f"{value:.1%}{detail}" if value == value else f"?{detail}"
        if least is None or value != value:
            self._add(Row(name, measured))
        else:
            self._add(Row(name, measured, f"≥ {least:.0%}", value >= least))

    def surplus(self, name: str, value: float, most: float | None, detail: str = "") -> None:
        """Add an overhead that should stay below a limit, if there is one."""
        if most is None:
            self._add(Row(name, f"{value:+.1%}{detail}"))
        else:
            self._add(Row(name, f"{value:+.1%}{detail}", f"≤ {most:.0%}", value <= most))

    def times(self, name: str, value: float, least: float, detail: str = "") -> None:
        """Add a ratio that should reach a limit."""
        self._add(Row(name, f"{value:.1f}×{detail}", f"≥ {least:g}×", value >= least))

    def error(self, name: str, value: float, most: float) -> None:
        """Add a relative error; NaN exceeds any limit."""
        self._add(Row(name, f"{value:.1e}", f"≤ {most:.0e}", value <= most))

    def failed(self, name: str, reason: str) -> None:
        """Add a part that could not be measured."""
        self._add(Row(name, reason, "runs", False))

    def table(self) -> str:
        """Return all rows as a Markdown table."""
        lines = ["| what | measured | limit | |", "| --- | ---: | ---: | --- |"]
        verdicts = {None: "", True: "ok", False: "MISSED"}
        lines += [f"| {row.name} | {row.measured} | {row.limit} | {verdicts[row.is_within]} |" for row in self.rows]
        return "\n".join(lines)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        verdict = {None: "", True: "ok", False: "MISSED"}[row.is_within]
        print(
            f"{time.perf_counter() - self.started:6.1f} s  {row.name}: {row.measured} {row.limit} {verdict}", flush=True
        )
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(row) | {"figures": self.figures}) + "\n")
