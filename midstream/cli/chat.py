"""`midstream chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from midstream.cli.connect import add_connection, add_sampling, open_client, sampling_of
from midstream.cli.pace import Pace
from midstream.errors import MidstreamError, UnsupportedError

_HELP = "/reset clears the conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser, max_tokens=512)
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command until the user exits."""
    console = Console(highlight=False)
    console.print(asyncio.run(_greeting(arguments)), style="bold", markup=False)
    console.print(_HELP, style="dim", soft_wrap=True)
    conversation = Conversation(arguments, console)
    while True:
        try:
            line = console.input("[bold cyan]you[/bold cyan]  ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            console.print(_HELP, style="dim", soft_wrap=True)
        elif line:
            conversation.say(line)


class Conversation:
    """The turns so far; a turn that fails is dropped."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self._arguments = arguments
        self._console = console
        self.reset()

    def reset(self) -> None:
        system = self._arguments.system
        self._turns = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        turns = [*self._turns, {"role": "user", "content": text}]
        pieces: list[str] = []
        pace = Pace()
        try:
            asyncio.run(self._answer(turns, pieces, pace))
        except KeyboardInterrupt:  # leaving the context has aborted the request; keep the partial answer
            self._console.print(" (cut)", style="dim")
        except MidstreamError as error:
            self._console.print(str(error), style="red", markup=False)
            return
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]
        self._console.print(str(pace), style="dim")

    async def _answer(self, turns: list[dict[str, str]], pieces: list[str], pace: Pace) -> None:
        async with open_client(self._arguments) as client:
            sampling, lora = sampling_of(self._arguments), self._arguments.lora
            async for chunk in client.generate(messages=turns, sampling=sampling, lora=lora):
                pace.note(chunk)
                pieces.append(chunk.text)
                self._console.out(chunk.text, end="")
        self._console.print()


async def _greeting(arguments: argparse.Namespace) -> str:
    async with open_client(arguments) as client:
        info = await client.model_info()
    if not info.has_chat_template:
        raise UnsupportedError(f"{info.model} has no chat template; use `midstream generate`")
    return f"{info.model}, {info.max_sequence_length:,} tokens"
