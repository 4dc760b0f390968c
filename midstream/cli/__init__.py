"""The `midstream` command.

Each sub-command is a module with `add_arguments(parser)` and `run(arguments)`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import midstream
from midstream.errors import MidstreamError
from midstream.python_process import python_command, python_environment

# Name of each command -> (module, help). Only the module of the requested command is imported.
COMMANDS = {
    "up": ("midstream.cli.up", "start everything on this machine"),
    "serve": ("midstream.cli.serve", "serve a model: `up` with the model as argument"),
    "status": ("midstream.cli.status", "show running processes: addresses, epochs, health"),
    "down": ("midstream.cli.down", "stop everything after streams finish"),
    "generate": ("midstream.cli.generate", "stream the answer to one prompt"),
    "chat": ("midstream.cli.chat", "hold a conversation"),
    "keys": (
        "midstream.cli.keys",
        "create a key pair for worker connections or receipts",
    ),
    "certificates": ("midstream.cli.certificates", "create certificates for services and clients"),
    "models": ("midstream.cli.models", "list the supported model families"),
    "prepare": ("midstream.cli.prepare", "prepare a model folder"),
    "check": ("midstream.cli.check", "report what the services would make of a model"),
    "doctor": ("midstream.cli.doctor", "check this machine and suggest a fix for each problem"),
    "demo": ("midstream.cli.demo", "start everything, stream a few answers concurrently, stop"),
    "bench": ("midstream.cli.bench.command", "measure a running service"),
    "audit": ("midstream.cli.audit", "check receipts, and compute their answers again"),
    "debug": ("midstream.cli.debug", "show how a token of a recorded request was chosen"),
    "lora": ("midstream.cli.lora", "load, unload and list adapters"),
    "top": ("midstream.cli.top.command", "show requests, batches, KV blocks and processes, live"),
    "stats": ("midstream.cli.stats", "show statistics of the scheduler's iterations"),
}
# Name of each command -> (module, help). These commands replace this process with another program, since services are
# not imported here; the program parses all arguments.
PROGRAMS = {
    "router": ("router", "run a single router; --help lists its settings"),
    "scheduler": ("scheduler", "run a single scheduler"),
    "worker": ("gpu_worker", "run a single worker"),
    "detokenizer": ("detokenizer", "run a single detokenizer"),
    "replay": ("scheduler.replay.replay", "replay a scheduler recording, unchanged or with other settings"),
    "backup": ("scheduler.journal.backup", "copy the journal and the documents of a running scheduler"),
    "simulate": ("scheduler.replay.simulator", "run the scheduler with simulated workers, to plan capacity"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments`, by default this process's.

    Returns:
        The exit status: 0, 1 for an error, 2 for a usage error, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in PROGRAMS:
        _run_program(PROGRAMS[words[0]][0], words[1:])
    _accept_all_characters()
    try:
        parsed, unknown = _parser(words).parse_known_args(words or ["--help"])
        if unknown:
            parsed.parser.error(_unrecognized(unknown, parsed.parser))
    except KeyboardInterrupt:  # while the command's modules are imported
        return 130
    try:
        status: int = parsed.run(parsed)
    except MidstreamError as error:
        print(f"midstream {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 1
    except OSError as error:
        hint = ""
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            hint = "; --run-dir and MIDSTREAM_HOME select other folders"
        print(f"midstream {parsed.command}: {error}{hint}", file=sys.stderr)
        return 1
    return status


def _run_program(module_name: str, words: Sequence[str]) -> NoReturn:
    """Replace this process with the program, so that the program receives this process's signals and can drain."""
    command = python_command(module_name, *words)
    os.execve(command[0], command, python_environment())  # noqa: S606 (needs no shell)


def _accept_all_characters() -> None:
    """Replace characters that the terminal's encoding lacks, instead of failing in the middle of a model's text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _unrecognized(words: list[str], command: argparse.ArgumentParser) -> str:
    """Return an error message for arguments that `command` does not have; it suggests the setting or flag that may be
    meant.
    """
    from midstream.cli.other_servers import advice_for, our_flag
    from midstream.config import KNOWN_SETTINGS

    known = re.findall(r"--[\w-]+", command.format_usage())

    def hint(flag: str) -> str:
        ours = our_flag(flag)
        setting = ours.removeprefix("--").replace("-", "_")
        if ours in known:
            return f"did you mean {ours}?"
        if ours == "--model":
            return f"the model is an argument without a flag: {command.prog} MODEL"
        if ours.startswith("--") and setting in KNOWN_SETTINGS:
            return f"this is a setting of the services: MIDSTREAM_{setting.upper()}=VALUE {command.prog} …"
        if advice := advice_for(flag):
            return advice
        close = difflib.get_close_matches(flag, known, n=1)
        return f"did you mean {close[0]}?" if close else ""

    flags = list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-")))
    hints = {flag: hint(flag) for flag in flags or words[:1]}
    if len(hints) == 1:
        (only,) = hints.values()
        return f"unrecognized arguments: {' '.join(words)}" + (f"; {only}" if only else "")
    lines = (f"  {flag}: {text or 'unknown'}" for flag, text in hints.items())
    return "\n".join([f"unrecognized arguments: {' '.join(words)}", *lines])


class _Parser(argparse.ArgumentParser):
    """A parser that accepts only whole names of flags: an abbreviation could mean another flag in a later version."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="midstream", description=midstream.__doc__)
    parser.add_argument("--version", action="version", version=f"midstream {midstream.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == next((word for word in words if not word.startswith("-")), None):
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run, parser=command)
    for name, (_, text) in PROGRAMS.items():
        commands.add_parser(name, help=text)
    return parser
