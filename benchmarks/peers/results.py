"""Stored measurements, so that a comparison can be spread over several sessions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .peer import parse_figures
from .rounds import Measurement


def read_results(path: Path) -> list[Measurement]:
    """Read measurements; return no measurements if the file does not exist."""
    if not path.exists():
        return []
    return [
        Measurement(item["round"], item["peer"], item["load"], parse_figures(json.dumps(item["figures"])))
        for item in json.loads(path.read_text(encoding="utf-8"))
    ]


def write_results(measurements: Sequence[Measurement], path: Path) -> None:
    """Write measurements as JSON."""
    path.write_text(json.dumps([asdict(it) for it in measurements], indent=1) + "\n", encoding="utf-8")


def merged(earlier: Sequence[Measurement], later: Sequence[Measurement]) -> list[Measurement]:
    """Merge measurements; newer ones replace older ones."""
    by_key = {(it.round, it.peer, it.figures.workload): it for it in (*earlier, *later)}
    return [by_key[key] for key in sorted(by_key)]
