"""`midstream models`: list the supported model families."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from midstream.model.families import HEADINGS, SERVED_FAMILIES, rows

_WIDTH = 180  # columns without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON, one object per line.")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        for family in SERVED_FAMILIES:
            print(json.dumps(asdict(family)))
        return 0
    table = Table(*HEADINGS, box=None)
    for row in rows():
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(table)
    console.print("\nOther causal language models use transformers, if it lets Midstream replace their attention.")
    return 0
