"""`midstream top`: the command, its keys, and how it reconnects."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from midstream.cli.connect import add_connection, open_client
from midstream.cli.top.board import Board
from midstream.cli.top.view import frame
from midstream.client import AsyncClient
from midstream.errors import UnavailableError

_RETRY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="Print one frame and exit; this is the default in a pipe.")
    add_connection(parser)
    parser.epilog = (
        "Keys: q quits, p pauses. The dashboard shows the same in a browser: /dashboard on a router's HTTP port."
    )


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    with contextlib.suppress(asyncio.CancelledError):
        if arguments.once or not console.is_terminal:
            asyncio.run(_print_once(arguments, console))
        else:
            asyncio.run(_watch(arguments, console))
    return 0


async def _print_once(arguments: argparse.Namespace, console: Console) -> None:
    board = Board()
    async with open_client(arguments) as client:
        async for status in client.status():
            board.take(status, is_first=True)
    console.print(frame(board, console.width, keys=""))


async def _watch(arguments: argparse.Namespace, console: Console) -> None:
    board, screen = Board(), _Screen()
    async with open_client(arguments) as client:
        following = asyncio.create_task(follow(client, board))
        show = screen.of(board, console)
        with _keys(screen.press), Live(get_renderable=show, console=console, screen=True, refresh_per_second=4):
            quitting = asyncio.create_task(screen.quit.wait())
            await asyncio.wait((following, quitting), return_when=asyncio.FIRST_COMPLETED)
            quitting.cancel()
        if not following.done():
            following.cancel()
        await following


async def follow(client: AsyncClient, board: Board) -> None:
    """Keep the board up to date, using any router that responds. Raises MidstreamError if the call is rejected."""
    while True:
        is_first = True
        try:
            async for status in client.status(follow=True):
                board.take(status, is_first=is_first)
                is_first = False
            board.lose("the router closed the connection")
        except UnavailableError as error:
            board.lose(error.message)
        await asyncio.sleep(_RETRY_S)


class _Screen:
    """State that key presses change."""

    def __init__(self) -> None:
        self.quit = asyncio.Event()
        self.is_paused = False

    def press(self, key: str) -> None:
        if key in ("q", "Q", "\x1b"):
            self.quit.set()
        elif key in ("p", " "):
            self.is_paused = not self.is_paused

    def of(self, board: Board, console: Console) -> Callable[[], RenderableType]:
        still: RenderableType | None = None

        def show() -> RenderableType:
            nonlocal still
            if not self.is_paused:
                still = None
                return frame(board, console.width)
            # Show "paused" in one more frame, then freeze until the key is pressed again.
            still = still or frame(board, console.width, is_paused=True)
            return still

        return show


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with each key that is pressed, if the terminal's keys can be read."""
    try:
        import termios
        import tty

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):
        yield
        return
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(number, 64).decode(errors="ignore"):
            press(key)

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
