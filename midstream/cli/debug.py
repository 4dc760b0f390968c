"""`midstream debug`: show how a token of a recorded request was chosen."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from midstream.cli.connect import add_connection, open_client
from midstream.cli.receipt_keys import read_keys
from midstream.errors import ConfigError, InvalidArgumentError, NotFoundError
from midstream.python_process import python_command, python_environment
from midstream.receipts.evidence import Evidence, read_evidence
from protos import receipts_pb2

if TYPE_CHECKING:
    from midstream.receipts.token_state import Candidate, TokenState

_EXIT_DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID", help="The request's id, as in its receipt.")
    parser.add_argument(
        "--at-token",
        type=int,
        required=True,
        metavar="N",
        help="The token's index in the output, from 0; the number of tokens means the end.",
    )
    parser.add_argument("--sequence", type=int, default=0, metavar="I", help="Index of the sequence. [0]")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="Show the K highest logits. [10]")
    parser.add_argument(
        "--evidence",
        type=Path,
        metavar="FILE",
        help="Receipt, request and output as JSON, as for `midstream audit`. [what the service has stored]",
    )
    parser.add_argument("--keys", type=Path, metavar="FILE", help="The public keys to trust. [those of the service]")
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="A recording of the scheduler (its setting `--record`), for the step, its other sequences, and times.",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="A folder or prepared model, whose tokenizer is used to show tokens as text."
    )
    parser.add_argument("--json", action="store_true", help="Print the state as JSON.")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if the computed token is not the recorded one."""
    try:
        from midstream.receipts.token_state import MAX_TOP
    except ImportError as error:
        raise ConfigError(f"needs `pip install midstream[audit]` ({error})", field="debug") from None
    if not 0 <= arguments.top <= MAX_TOP:
        raise InvalidArgumentError(f"is {arguments.top}; must be in 0..{MAX_TOP}", field="top")
    state, history = asyncio.run(_state(arguments)), _history(arguments)
    if arguments.json:
        found = asdict(state) | {"is_as_recorded": state.is_as_recorded}
        print(json.dumps(found | ({"recording": history} if history is not None else {})))
    else:
        _show(state, history, _texts(arguments.model))
    return 0 if state.is_as_recorded and not state.difference else _EXIT_DIFFERS


async def _state(arguments: argparse.Namespace) -> TokenState:
    from midstream.receipts.token_state import Debugger

    async with open_client(arguments) as client:
        keys = None if arguments.keys is None else read_keys(arguments.keys)
        debugger = Debugger(client, keys)
        given = _given(arguments)
        evidence = given if given is not None else await debugger.find(arguments.request_id)
        return await debugger.state(evidence, arguments.at_token, sequence=arguments.sequence, num_top=arguments.top)


def _given(arguments: argparse.Namespace) -> Evidence | None:
    if arguments.evidence is None:
        return None
    for item in read_evidence(arguments.evidence.read_text(encoding="utf-8"), str(arguments.evidence)):
        try:
            found = receipts_pb2.ReceiptBody.FromString(item.receipt.body).request_id
        except ValueError:  # DecodeError
            continue
        # The receipt has the id that the scheduler knows, which may have a suffix for the client.
        if arguments.request_id in (found, found.rpartition("@")[0]):
            return item
    raise NotFoundError(f"has no receipt of {arguments.request_id!r}", field="evidence")


def _history(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the recording holds about the token; None without a recording."""
    if arguments.recording is None:
        return None
    # Services are not imported here.
    place = ("--request", arguments.request_id, "--at-token", str(arguments.at_token))
    command = python_command(
        "scheduler.replay.replay", str(arguments.recording), *place, "--sequence", str(arguments.sequence)
    )
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=python_environment())
    if not done.stdout:
        raise ConfigError(done.stderr.strip() or "cannot be replayed", field="recording")
    history: dict[str, Any] = json.loads(done.stdout)
    return history


def _texts(model: str | None) -> Callable[[int], str]:
    if model is None:
        return lambda _: ""
    from midstream.model.folder import open_model_folder
    from midstream.model.tokenizer import Tokenizer

    tokenizer = Tokenizer(open_model_folder(model).path)
    return lambda token: repr(tokenizer.decode([token], skip_special_tokens=False))


def _show(state: TokenState, history: Mapping[str, Any] | None, text: Callable[[int], str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    console.print(
        f"token {state.index} of sequence {state.sequence} of {state.request_id}, at position {state.position}: "
        f"{state.chosen.token} {text(state.chosen.token)}".rstrip()
        + f", {_verdict(state)}"
    )
    if state.difference:
        console.print(f"the service computes it differently: {state.difference}")
    cut = f"top_p {state.top_p:g}, probabilities from {state.least:.3g} on: {state.num_drawable} tokens"
    if state.random_number is None:
        console.print("greedy: the token with the highest logit")
    else:
        console.print(f"temperature {state.temperature:g}, {cut}")
        console.print(
            f"random number {state.random_number:.17g}; the token's part: {state.begin:.9g} to {state.end:.9g}"
        )
    console.print(f"{state.num_allowed} tokens allowed by the grammar, if there is one")
    table = Table("token", "text", "logit", "with penalties", "with grammar", "probability")
    for item in (state.chosen, *state.top):
        table.add_row(*_cells(item, text))
    console.print(table)
    if history is not None:
        _show_history(console, history)


def _verdict(state: TokenState) -> str:
    if state.recorded is None:
        return "which is not in the output: the sequence ended before it"
    return "as recorded" if state.is_as_recorded else f"but {state.recorded} was recorded"


def _cells(item: Candidate, text: Callable[[int], str]) -> tuple[str, ...]:
    logits = (f"{value:.6g}" for value in (item.logit, item.steered, item.masked))
    return str(item.token), text(item.token), *logits, f"{item.probability:.4g}"


def _show_history(console: Console, history: Mapping[str, Any]) -> None:
    step = history["step"]
    if step is None:
        console.print("the recording does not have the token's step")
    else:
        mates = [f"{mate['request_id']}[{mate['sequence']}]" for mate in step["mates"]]
        console.print(
            f"step {step['step_id']} of {step['group_id']} (epoch {step['epoch']}), row {step['row']}: "
            f"{step['forward_us']} µs, after {step['waiting_us']} µs of waiting; with {', '.join(mates) or 'no others'}"
        )
    console.print(f"{history['num_cached_tokens']} prompt tokens were in the cache at the start")
    for entry in history["time_line"]:
        at = datetime.fromtimestamp(entry["time_ns"] / 1e9, UTC)
        console.print(f"{at.strftime('%H:%M:%S.%f')}  {entry['event']}")
    console.print(history["missing"])
    if history["difference"]:
        console.print(f"the recording does not replay: {history['difference']}")
