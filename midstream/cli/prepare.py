"""`midstream prepare`: lays down a model folder. `midstream up` does it by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from midstream.model.folder import EMBEDDED_MODEL, open_model_folder, prepare_model_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "source",
        nargs="?",
        default=EMBEDDED_MODEL,
        metavar="SOURCE",
        help=f"A Hugging Face folder, a .gguf file, or `{EMBEDDED_MODEL}`. [{EMBEDDED_MODEL}]",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="A new folder to copy it to. [where services find it by itself]"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    console = Console(highlight=False)
    with console.status(f"Preparing {arguments.source}"):
        if arguments.output:
            folder = prepare_model_folder(arguments.source, arguments.output)
        else:
            folder = open_model_folder(arguments.source)
    console.print(f"[bold]{folder.name}[/bold] lies in {folder.path}")
    console.print(
        f"{folder.architecture}, {folder.num_layers} layers of width {folder.hidden_size}, "
        f"{folder.vocab_size:,} tokens, {folder.max_sequence_length:,} positions, {folder.weights_format}"
    )
    return 0
