"""The view of `midstream demo --kill`: streams, processes and kills on a terminal, otherwise numbered lines."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, Group
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from midstream.cli.display import PHASE_STYLES, LiveDisplay, answer_panel
from midstream.cli.kill_demo import Answer, KillDemo
from midstream.cli.recording import SvgRecording
from midstream.cli.run_dir import ProcessPhase, RunState

_PARTS_WIDTH = 42
_LOG_LINES = 8


class KillView(LiveDisplay):
    """Shows a `KillDemo`; `changed` is the demo's observer."""

    def __init__(self, console: Console, state: Callable[[], RunState], recording: SvgRecording | None = None) -> None:
        self.demo: KillDemo | None = None
        self._state = state
        self._recording = recording
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._num_answers = 0
        # A process that restarted within one frame would otherwise never be shown in red.
        self._red_until_s: dict[str, float] = {}
        super().__init__(console, is_transient=False, frames_per_second=12)

    def changed(self, line: str) -> None:
        """Show a line of the log; update the text if the line is empty."""
        demo = self.demo
        if line:
            self._log.append(self._stamped(line))
            if not self._live.is_started:
                self._console.print(self._log[-1], markup=False, soft_wrap=True)
        if demo is None:
            return
        if self._recording is not None and (line or self._recording.is_due):
            self._recording.add(self.render(SvgRecording.HEIGHT, SvgRecording.WIDTH))
        if line.startswith("killed ") and demo.kills:
            self._red_until_s[demo.kills[-1].name] = time.monotonic() + 0.7
        if demo.num_answers != self._num_answers and not self._live.is_started:
            self._num_answers = demo.num_answers
            self._console.print(self._stamped(f"{demo.num_identical} of {demo.num_answers} answers identical"))

    def render(self, height: int | None = None, width: int | None = None) -> Layout:
        """Return the whole view, by default in the size of the console."""
        height = max(12, (height or self._console.height) - 1)
        layout = Layout(size=height)
        streams = self._streams((width or self._console.width) - _PARTS_WIDTH, height)
        layout.split_row(Layout(streams), Layout(self._parts(), size=_PARTS_WIDTH))
        return layout

    def _render(self) -> Layout:
        return self.render()

    def _streams(self, width: int, height: int) -> Group:
        demo = self.demo
        answers = demo.current[:4] if demo is not None else []
        height = max(4, height // max(1, len(answers)))
        return Group(*(_stream_panel(answer, width, height) for answer in answers))

    def _parts(self) -> Group:
        demo = self.demo
        table = Table.grid(padding=(0, 1))
        for process in self._state().processes:
            is_red = time.monotonic() < self._red_until_s.get(process.name, 0.0)
            phase = ProcessPhase.RESTARTING if is_red else process.phase
            style = PHASE_STYLES[phase]
            label = "KILLED" if phase is ProcessPhase.RESTARTING else phase.value
            restarts = f"restarted {process.num_restarts}x" if process.num_restarts else ""
            table.add_row(Text("●", style=style), process.name, Text(label, style=style), Text(restarts, style="dim"))
        kills, count, answers = (len(demo.kills), demo.num_kills, demo.num_answers) if demo is not None else (0, 0, 0)
        identical = demo.num_identical if demo is not None else 0
        facts = Text.assemble(
            (f"{kills} of {count} kills", "bold red"),
            "\nanswers identical: ",
            (f"{identical} of {answers}", "bold green" if identical == answers else "bold red"),
        )
        log = Text("\n".join(textwrap.shorten(line, _PARTS_WIDTH - 4) for line in self._log), style="dim")
        return Group(Panel(table, title="parts"), Panel(facts), Panel(log, title="log"))


def _stream_panel(answer: Answer, width: int, height: int) -> Panel:
    style, verdict = "blue", str(answer.pace)
    if answer.is_identical is not None:
        style, verdict = ("green", "identical") if answer.is_identical else ("red", "DIFFERENT")
    return answer_panel(answer.prompt, answer.text, Text(verdict, style=style), style, width, height)


def summarize(demo: KillDemo, console: Console) -> None:
    """Print the kills, the longest gaps and whether all answers were identical."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("killed")
    table.add_column("times", justify="right")
    table.add_column("longest gap of any stream", justify="right")
    for kind, gap_s in demo.longest_gaps().items():
        times = sum(kill.kind == kind for kill in demo.kills)
        table.add_row(kind.replace("gpu_", ""), str(times), f"{gap_s:.2f} s")
    console.print(table)
    verdict = "no" if demo.differences else "yes"
    console.print(
        f"{len(demo.kills)} kills, {demo.num_answers} streams, identical to the undisturbed run: {verdict}",
        style="bold red" if demo.differences else "bold green",
    )
    for line in demo.differences:
        console.print(f"  {line}", markup=False, soft_wrap=True)
