"""`midstream generate`: stream the answer to one prompt."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from midstream.chunk import Chunk
from midstream.cli.connect import add_connection, add_sampling, open_client, sampling_of
from midstream.cli.pace import Pace
from midstream.client.result import Result
from midstream.errors import UnavailableError
from midstream.receipts.evidence import Evidence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="Prompt text, or `-` for standard input.")
    parser.add_argument("--raw", action="store_true", help="Continue the raw text, without the model's chat template.")
    add_sampling(parser, max_tokens=256)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="The request's deadline. [none]")
    parser.add_argument(
        "--receipt", type=Path, metavar="FILE", help="Append the receipt, the request and the output for an audit."
    )
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command: print the text to standard output, and the speed to standard error if it is a terminal."""
    pace = asyncio.run(_generate(arguments))
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(str(pace), style="dim")
    return 0


async def _generate(arguments: argparse.Namespace) -> Pace:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    async with open_client(arguments) as client:
        is_chat = not arguments.raw and (await client.model_info()).has_chat_template
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        pace = Pace()
        chunk: Chunk
        stream = client.generate(
            None if is_chat else prompt,
            messages=[*system, {"role": "user", "content": prompt}] if is_chat else None,
            sampling=replace(sampling_of(arguments), return_receipt=arguments.receipt is not None),
            timeout_s=arguments.timeout,
            lora=arguments.lora,
        )
        result = Result(stream.request_id)
        async for chunk in stream:
            result.add(chunk)
            pace.note(chunk)
            print(chunk.text, end="", flush=True)
        print()
        if arguments.receipt is not None:
            known = await client.receipt(stream.request_id, include_request=True)
            _append(arguments.receipt, result, known.request)
    return pace


def _append(path: Path, result: Result, request: bytes) -> None:
    """Append the evidence to a file. Raises UnavailableError if the stream ended without a receipt."""
    if result.receipt is None:
        raise UnavailableError("the stream ended without a receipt", field="receipt")
    evidence = Evidence(result.receipt, request, [sequence.token_ids for sequence in result.sequences])
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(evidence.to_json()) + "\n")
