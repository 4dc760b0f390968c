"""`midstream serve MODEL`: `midstream up` with the model as a positional argument."""

from __future__ import annotations

import argparse

from midstream.cli.up import MODEL_HELP, add_service_flags
from midstream.cli.up import run as run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="+",
        metavar="MODEL",
        help=f"{MODEL_HELP} Several models share the routers; NAME=MODEL sets one's name in the API.",
    )
    add_service_flags(parser)
