"""`midstream models`: list the supported model families."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from midstream.model.families import HEADINGS, SERVED_FAMILIES, rows

_WIDTH = 180  # in columns, if the output is not a terminal
_NARROW = ("family", "model_type", "on a CPU", "notes")  # headings on a narrow terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON, one object per line.")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        for family in SERVED_FAMILIES:
            print(json.dumps(asdict(family)))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    table = _table(HEADINGS)
    left_out = [heading for heading in HEADINGS if heading not in _NARROW]
    # If the terminal is too narrow for the longest words, rich would cut them.
    is_cut = console.measure(table, options=console.options.update(width=_WIDTH)).minimum > console.width
    console.print(_table(_NARROW) if is_cut else table)
    if is_cut:
        console.print(f"\nA wider terminal or --json also shows: {', '.join(left_out)}.")
    console.print("\nOther causal language models use transformers, if it lets Midstream replace their attention.")
    return 0


def _table(headings: tuple[str, ...]) -> Table:
    """Return a table of the columns with these headings."""
    table = Table(*headings, box=None)
    for row in rows():
        cells = dict(zip(HEADINGS, row, strict=True))
        table.add_row(*(cells[heading] for heading in headings))
    return table
