"""Show a run's state: as a table that is updated in place on a terminal, otherwise as one line per change."""

from __future__ import annotations

import textwrap
import time
from abc import ABC, abstractmethod
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from midstream.cli.run_dir import ProcessPhase, RunState

PHASE_STYLES = {
    ProcessPhase.STARTING: "yellow",
    ProcessPhase.READY: "green",
    ProcessPhase.UNHEALTHY: "red",
    ProcessPhase.RESTARTING: "red",
    ProcessPhase.STOPPING: "yellow",
    ProcessPhase.STOPPED: "dim",
    ProcessPhase.FAILED: "red",
}


class LiveDisplay(ABC):
    """Shows a live view on a terminal; without a terminal, or once the context has ended, prints changes as lines."""

    def __init__(self, console: Console, *, is_transient: bool, frames_per_second: int) -> None:
        """Create the display. It renders immediately, so subclasses must set their own attributes first."""
        self._console = console
        self._start_s = time.monotonic()
        self._live = Live(
            get_renderable=self._render, console=console, transient=is_transient, refresh_per_second=frames_per_second
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @abstractmethod
    def _render(self) -> RenderableType:
        """Return the current view."""

    def _stamped(self, line: str) -> str:
        """Return `line` with the number of seconds since the start as a prefix."""
        return f"{time.monotonic() - self._start_s:5.1f} s  {line}"


class RunDisplay(LiveDisplay):
    """Shows the progress of a run. Call it with the state whenever the state may have changed."""

    def __init__(self, console: Console) -> None:
        self._seen: dict[str, tuple[str, str]] = {}
        self._state: RunState | None = None
        super().__init__(console, is_transient=True, frames_per_second=8)

    def show(self, state: RunState) -> None:
        self._state = state
        if self._live.is_started:
            return
        for process in state.processes:
            seen = (process.phase.value, process.detail)
            if self._seen.get(process.name) != seen:
                self._seen[process.name] = seen
                line = self._stamped(f"{process.name:<14} {process.phase}  {process.detail}")
                self._console.print(line.rstrip(), markup=False, soft_wrap=True)

    def _render(self) -> Table | Text:
        if self._state is None:
            return Text("")
        table = Table.grid(padding=(0, 2))
        for process in self._state.processes:
            style = PHASE_STYLES[process.phase]
            mark = "●" if process.phase is ProcessPhase.READY else "○"
            table.add_row(
                Text(mark, style=style),
                process.name,
                Text(process.phase.value, style=style),
                Text(process.detail, style="dim", overflow="ellipsis", no_wrap=True),
            )
        table.add_row("", f"{time.monotonic() - self._start_s:.0f} s", "", "", style="dim")
        return table


def answer_panel(prompt: str, text: str, subtitle: Text, border_style: str, width: int, height: int) -> Panel:
    """Return a panel with the prompt as its title and the last lines of the answer that fit."""
    lines = [line for part in text.split("\n") for line in (textwrap.wrap(part, width - 4) or [""])]
    return Panel(
        Text("\n".join(lines[-(height - 2) :])),
        title=Text(textwrap.shorten(prompt, width - 6, placeholder="…"), style="bold"),
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        height=height,
        border_style=border_style,
    )
