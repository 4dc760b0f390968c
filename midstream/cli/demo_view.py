"""Show several streaming answers side by side: as panels on a terminal, otherwise as numbered lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from midstream.cli.display import LiveDisplay, answer_panel
from midstream.cli.pace import Pace

_LINE_WIDTH = 92
_WIDE = 100
_MAX_HEIGHT = 14


@dataclass(slots=True)
class Answer:
    """One prompt and its answer so far."""

    prompt: str
    text: str = ""
    pace: Pace = field(default_factory=Pace)


class DemoView(LiveDisplay):
    """Shows `answers`, which may change between updates."""

    def __init__(self, answers: Sequence[Answer], console: Console) -> None:
        self._answers = answers
        self._printed = [0] * len(answers)
        super().__init__(console, is_transient=False, frames_per_second=12)

    def __enter__(self) -> Self:
        if not self._console.is_terminal:
            for number, answer in enumerate(self._answers, 1):
                self._console.print(f"{number} > {answer.prompt}", markup=False, soft_wrap=True)
        return super().__enter__()

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
    def _panel(answer: Answer, width: int, height: int) -> Panel:
        label, border = ("green", "green") if answer.pace.reason else ("dim", "blue")
        return answer_panel(answer.prompt, answer.text, Text(str(answer.pace), style=label), border, width, height)
