"""Renders a frame of `midstream top`."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from midstream.cli.top.board import Board
from midstream.cli.top.charts import CACHED, FREE, HELD, SHARED, block_map, columns, share_bar
from protos import status_pb2

_State = status_pb2.PartStatus.State
_STATES = {
    _State.SERVING: ("● serving", "green"),
    _State.DEGRADED: ("▲ degraded", "yellow"),
    _State.DRAINING: ("◐ draining", "yellow"),
    _State.LOST: ("✕ lost", "bold red"),
    _State.UNKNOWN: ("? unknown", "yellow"),
}
_CHART_HEIGHT = 4
_MAP_ROWS = 3
_KEYS = "q quit  p pause"


def frame(board: Board, width: int, *, is_paused: bool = False, keys: str = _KEYS) -> RenderableType:
    """Return a complete frame for a terminal of this width."""
    status, problem = board.status, board.problem
    header = Table.grid(expand=True)
    header.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    header.add_column(no_wrap=True, justify="right")
    title = Text.assemble(("Midstream", "bold cyan"))
    if status is not None:
        title.append(f"  {status.model}  {status.router_id}  {_clock(status.time_unix_ms)}")
    header.add_row(title, Text("paused  " * is_paused + keys, style="dim"))
    shown: list[RenderableType] = [header]
    if problem:
        shown.append(Text(f"✕ {problem}", style="bold red" if status is not None else "yellow"))
    if status is not None:
        shown += [_numbers(board, status, width), _parts(status), *_groups(status, width)]
    return Group(*shown)


def _numbers(board: Board, status: status_pb2.SystemStatus, width: int) -> RenderableType:
    latest = board.samples[-1]
    inner = max(24, (width - 12) // 3)
    generated = [sample.generated_tokens_per_s for sample in board.samples]
    rate = Text.assemble(
        (f"{latest.generated_tokens_per_s:,.0f}", "bold cyan"), " generated  ",
        (f"{latest.prompt_tokens_per_s:,.0f}", "bold"), " of prompts",
    )  # fmt: skip
    chart = Text("\n".join(columns(generated, inner, _CHART_HEIGHT)), style="cyan", no_wrap=True)
    panels: list[tuple[str, RenderableType]] = [
        ("tokens/s", Group(rate, chart)),
        (f"latency over {status.latency_window_s} s", _latencies(latest)),
        ("requests", _requests(status, inner)),
    ]
    boxes = [Panel(content, title=title, title_align="left", border_style="dim") for title, content in panels]
    if width < 3 * 28:
        return Group(*boxes)
    grid = Table.grid(expand=True)
    for _ in boxes:
        grid.add_column(ratio=1)
    grid.add_row(*boxes)
    return grid


def _latencies(sample: status_pb2.StatusSample) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("p95", justify="right")
    for name, half, most in (
        ("first token", "time_to_first_token_p50_ms", "time_to_first_token_p95_ms"),
        ("between tokens", "inter_token_p50_ms", "inter_token_p95_ms"),
        ("in the queue", "", "queue_time_p95_ms"),
    ):
        table.add_row(name, *(_milliseconds(sample, field) for field in (half, most)))
    table.add_row("KV blocks held", "", f"{sample.kv_usage:.1%}")
    return table


def _requests(status: status_pb2.SystemStatus, width: int) -> Group:
    requests = status.requests
    rows = (
        (requests.num_generation, "generating", "cyan"),
        (requests.num_context, "in context", "magenta"),
        (requests.num_queued, "queued", "yellow"),
        (requests.num_paused, "paused", "red"),
    )
    counts = Table.grid(expand=True)
    counts.add_column(ratio=1)
    counts.add_column(ratio=1)
    words = [Text.assemble((f"{number:>4}", f"bold {style}"), f" {name}") for number, name, style in rows]
    counts.add_row(words[0], words[1])
    counts.add_row(words[2], words[3])
    ended = sorted(status.counts.num_finished_by_reason.items())
    text = ", ".join(f"{number:,} {reason}" for reason, number in ended) or "none"
    lost = f"{status.counts.num_recoveries:,} recovered from lost workers"
    if status.counts.num_handovers:
        lost += f", {status.counts.num_handovers:,} moved from prefill to decode"
    bar = share_bar([(number, style) for number, _, style in rows], width)
    return Group(bar, counts, Text(f"ended: {text}", style="dim"), Text(lost, style="dim"))


def _parts(status: status_pb2.SystemStatus) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("part", width=11)
    table.add_column("name", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("state", width=10)
    table.add_column("detail", ratio=3, no_wrap=True, overflow="ellipsis")
    for part in status.parts:
        text, style = _STATES.get(part.state, ("?", "yellow"))
        # Use Text, so that a process's name is not parsed as markup.
        table.add_row(part.kind, Text(part.name), Text(text, style=style), Text(part.detail, style="dim"))
    return table


def _groups(status: status_pb2.SystemStatus, width: int) -> list[RenderableType]:
    if not status.groups:
        return [Text("No worker is connected.", style="yellow")]
    legend = Text()
    for (glyph, style), word in ((SHARED, "shared"), (HELD, "held"), (CACHED, "cached"), (FREE, "free")):
        legend.append(f" {glyph}", style=style).append(f" {word} ", style="dim")
    shown: list[RenderableType] = [Rule(Text.assemble("KV blocks ", legend), align="left", style="dim")]
    for group in status.groups:
        facts = (
            f"  {group.num_sequences} of {group.max_num_sequences} sequences  {group.steps_per_s:.1f} steps/s  "
            f"{group.num_held_blocks:,} held, {group.num_shared_blocks:,} shared, {group.num_cached_blocks:,} cached "
            f"of {group.num_blocks:,} blocks"
        )
        if group.num_stored_blocks:
            facts += f", {group.num_stored_blocks:,} in tiers"
        title = Text(no_wrap=True, overflow="ellipsis").append(group.group_id, style="bold").append(facts, style="dim")
        shown += [title, block_map(group.block_map, width, _MAP_ROWS)]
    return shown


def _milliseconds(sample: status_pb2.StatusSample, name: str) -> str:
    if not name:
        return ""
    if not sample.HasField(name):  # type: ignore[arg-type]
        return "–"
    value: float = getattr(sample, name)
    return f"{value / 1e3:.1f} s" if value >= 1e3 else f"{value:.0f} ms"


def _clock(unix_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1e3))
