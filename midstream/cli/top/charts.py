"""Text charts that are also readable without color, for example in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from protos import status_pb2

_EIGHTHS = " ▁▂▃▄▅▆▇█"
# Contents of a character in the block map, by priority: (glyph, style).
SHARED, HELD, CACHED, FREE = ("▓", "magenta"), ("█", "cyan"), ("▒", "dark_cyan"), ("·", "bright_black")


def columns(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a bar chart of the last `width` values, scaled to the maximum, as `height` lines from top to bottom."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0) or 1.0
    eighths = [0 if value <= 0 else max(1, round(value / top * height * 8)) for value in shown]
    lines = []
    for row in reversed(range(height)):
        line = "".join(_EIGHTHS[min(max(level - row * 8, 0), 8)] for level in eighths)
        lines.append(line.rjust(width))
    return lines


def share_bar(parts: Sequence[tuple[int, str]], width: int) -> Text:
    """Return a stacked bar of numbers with their styles; every non-zero number gets at least one character."""
    total = sum(number for number, _ in parts)
    if not total:
        return Text("─" * width, style="bright_black")
    sizes = [max(1, width * number // total) if number else 0 for number, _ in parts]
    sizes[sizes.index(max(sizes))] += width - sum(sizes)
    bar = Text()
    for size, (_, style) in zip(sizes, parts, strict=True):
        bar.append("█" * size, style=style)
    return bar


def block_map(blocks: status_pb2.BlockMap, width: int, max_rows: int) -> Text:
    """Return one character per run of blocks: shared if any block is shared, else held, else cached, else free."""
    num_cells = len(blocks.held)
    run = max(1, -(-num_cells // (width * max_rows)))
    text = Text(no_wrap=True)
    for index, start in enumerate(range(0, num_cells, run)):
        end = start + run
        if index and index % width == 0:
            text.append("\n")
        if any(blocks.shared[start:end]):
            text.append(*SHARED)
        elif any(blocks.held[start:end]):
            text.append(*HELD)
        else:
            text.append(*(CACHED if any(blocks.cached[start:end]) else FREE))
    return text
