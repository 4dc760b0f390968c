"""`midstream prepare`: create a model folder. `midstream up` does this automatically."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midstream.errors import ConfigError
from midstream.model.folder import EMBEDDED_MODEL, ModelFolder, open_model_folder, prepare_model_folder
from midstream.python_process import python_command, python_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        default=EMBEDDED_MODEL,
        metavar="SOURCE",
        help=f"A Hugging Face folder, a .gguf file, or `{EMBEDDED_MODEL}`. [{EMBEDDED_MODEL}]",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="New folder to which the model is copied. [the cache that services use]",
    )
    parser.add_argument(
        "--weights",
        choices=("int4", "int8"),
        help="Quantize the model's linear layers: int4 in groups of 32, int8 per row. Writes a compressed-tensors "
        "checkpoint to --output, and reports the change in perplexity on a text.",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="Text file on which to measure the perplexity. [the topics of Python's help()]",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.weights:
        return _quantize(arguments)
    with _spinner(f"Preparing {arguments.source}"):
        if arguments.output:
            folder = prepare_model_folder(arguments.source, arguments.output)
        else:
            folder = open_model_folder(arguments.source)
    _describe(folder)
    return 0


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    if not sys.stdout.isatty():
        yield
        return
    from rich.console import Console  # importing it takes as long as opening a prepared folder
    from rich.markup import escape

    with Console().status(escape(text)):
        yield


def _quantize(arguments: argparse.Namespace) -> int:
    """Quantize in a worker process, which imports torch."""
    if arguments.output is None:
        raise ConfigError("--weights requires --output, a new folder for the quantized model", field="output")
    if arguments.text is not None and not arguments.text.is_file():
        raise ConfigError(f"no such file: {arguments.text}", field="text")
    flags = ["--weights", arguments.weights, *(("--text", str(arguments.text.resolve())) if arguments.text else ())]
    model = arguments.source if arguments.source == EMBEDDED_MODEL else str(Path(arguments.source).resolve())
    command = python_command("gpu_worker.quantize", model, str(arguments.output.resolve()), *flags)
    result = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        return result.returncode
    report = json.loads(result.stdout.splitlines()[-1])
    _describe(open_model_folder(str(arguments.output)))
    print(f"quantized {report['matrices']} matrices to {arguments.weights}")
    if report["types"]:
        print(
            f"the source was already quantized ({', '.join(report['types'])}), and is now rounded a second time; the "
            "original checkpoint loses less"
        )
    if "after" in report:
        change = report["after"] / report["before"] - 1
        print(
            f"perplexity of {report['tokens']:,} tokens: {report['before']:.3f} before, {report['after']:.3f} after "
            f"({change:+.1%})"
        )
    else:
        print("the text is too short to measure the perplexity")
    return 0


def _describe(folder: ModelFolder) -> None:
    print(f"{folder.name} is in {folder.path}")
    print(
        f"{folder.architecture}, {folder.num_layers} layers of width {folder.hidden_size}, "
        f"{folder.vocab_size:,} tokens, {folder.max_sequence_length:,} positions, {folder.weights_format}"
    )
