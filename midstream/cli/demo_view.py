"""Show several streaming answers side by side: as panels on a terminal, otherwise as numbered lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from midstream.cli.pace import Pace

_LINE_WIDTH = 92
_WIDE = 100
_MAX_HEIGHT = 14


class ShownAnswer(Protocol):
    """The attributes of an answer that the view reads."""

    prompt: str
    text: str
    pace: Pace


class DemoView:
    """Context manager that shows `answers`, which change between updates."""

    def __init__(self, answers: Sequence[ShownAnswer], console: Console) -> None:
        self._answers = answers
        self._console = console
        self._printed = [0] * len(answers)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=12)

    def __enter__(self) -> DemoView:
        if self._console.is_terminal:
            self._live.start()
        else:
            for number, answer in enumerate(self._answers, 1):
                self._console.print(f"{number} > {answer.prompt}", markup=False, soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def advance(self, index: int) -> None:
        """Show new text of answer `index`."""
        if not self._console.is_terminal:
            self._print_lines(index, is_whole=False)

    def finish(self, index: int) -> None:
        """Show that answer `index` is complete."""
        if not self._console.is_terminal:
            self._print_lines(index, is_whole=True)

    def _print_lines(self, index: int, *, is_whole: bool) -> None:
        """Print the completed lines of an answer."""
        paragraphs = self._answers[index].text.splitlines()
        lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, _LINE_WIDTH)]
        settled = len(lines) if is_whole else max(0, len(lines) - 1)
        for line in lines[self._printed[index] : settled]:
            self._console.print(f"{index + 1} | {line}", markup=False, soft_wrap=True)
        self._printed[index] = max(self._printed[index], settled)

    def _render(self) -> Columns:
        width = self._console.width
        num_columns = 2 if width >= _WIDE else 1
        room = (self._console.height - 4) // -(-len(self._answers) // num_columns)
        height = min(max(6, room), _MAX_HEIGHT)
        panel_width = width // num_columns - 1
        panels = [self._panel(answer, panel_width, height) for answer in self._answers]
        return Columns(panels, width=panel_width, padding=(0, 0), expand=False)

    @staticmethod
    def _panel(answer: ShownAnswer, width: int, height: int) -> Panel:
        room = height - 2
        lines = [line for part in answer.text.split("\n") for line in (textwrap.wrap(part, width - 4) or [""])]
        return Panel(
            Text("\n".join(lines[-room:])),
            title=Text(textwrap.shorten(answer.prompt, width - 6, placeholder="…"), style="bold"),
            title_align="left",
            subtitle=Text(str(answer.pace), style="green" if answer.pace.reason else "dim"),
            subtitle_align="right",
            height=height,
            border_style="green" if answer.pace.reason else "blue",
        )
