"""Shows a run's state: a table that changes in place on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
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


class RunDisplay:
    """Follows a run; give it the state whenever it may have changed.

    Inside its context a terminal shows a table. Elsewhere, and after the context, changes are lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._seen: dict[str, tuple[str, str]] = {}
        self._state: RunState | None = None
        self._live = Live(get_renderable=self._render, console=console, transient=True, refresh_per_second=8)

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, state: RunState) -> None:
        """Show `state`."""
        self._state = state
        if self._live.is_started:
            return
        for process in state.processes:
            seen = (process.phase.value, process.detail)
            if self._seen.get(process.name) != seen:
                self._seen[process.name] = seen
                elapsed = f"{time.monotonic() - self._start:5.1f} s"
                self._console.print(
                    f"{elapsed}  {process.name:<14} {process.phase}  {process.detail}".rstrip(), soft_wrap=True
                )

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
        table.add_row("", f"{time.monotonic() - self._start:.0f} s", "", "", style="dim")
        return table
