"""`midstream serve MODEL`: `midstream up` with the model in the place where other servers take it."""

from __future__ import annotations

import argparse

from midstream.cli.up import MODEL_HELP, add_service_flags
from midstream.cli.up import run as run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_service_flags(parser)
