"""Records a terminal view as an animated SVG file, which plays as an image, without scripts."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

_BLACK, _RED, _GREEN, _YELLOW = (40, 42, 54), (255, 92, 87), (90, 220, 130), (243, 208, 97)
_BLUE, _MAGENTA, _CYAN, _WHITE = (87, 157, 255), (255, 106, 193), (126, 214, 223), (220, 220, 220)
_THEME = TerminalTheme((17, 19, 24), (214, 218, 224), [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _WHITE])
# Minimum time between frames.
_INTERVAL_S = 0.8
# Template for one frame of rich's SVG, without fonts and window, which the outer SVG defines once for all frames.
_FRAME = "\x1f".join(("{width}", "{height}", "{terminal_x}", "{terminal_y}", "{styles}", "{backgrounds}{matrix}"))
_CLIPPING = re.compile(r' clip-path="[^"]*"')


class SvgRecording:
    """Frames of a view, and the times at which they were shown."""

    WIDTH, HEIGHT = 118, 33

    def __init__(self) -> None:
        self._frames: list[tuple[float, str]] = []

    @property
    def is_due(self) -> bool:
        """Whether it is time for another frame."""
        return not self._frames or time.monotonic() - self._frames[-1][0] >= _INTERVAL_S

    def add(self, view: RenderableType) -> None:
        console = Console(
            width=self.WIDTH,
            height=self.HEIGHT,
            file=io.StringIO(),
            record=True,
            force_terminal=True,
            color_system="truecolor",
        )
        console.print(view)
        frame = console.export_svg(theme=_THEME, code_format=_FRAME, unique_id=f"f{len(self._frames)}")
        self._frames.append((time.monotonic(), frame))

    def write(self, path: Path) -> None:
        """Write all frames as one looping animation with their original durations."""
        starts = [at_s for at_s, _ in self._frames]
        total_s = starts[-1] - starts[0] + 4 * _INTERVAL_S
        groups, styles, size = [], [], (0.0, 0.0)
        for number, (at_s, frame) in enumerate(self._frames):
            width, height, x, y, style, body = frame.split("\x1f")
            size = (float(width), float(height))
            begin = 100 * (at_s - starts[0]) / total_s
            end = 100 * (starts[number + 1] - starts[0]) / total_s if number + 1 < len(starts) else 100.0
            styles.append(f"{style}\n{_keyframes(number, begin, end, total_s)}")
            body = _CLIPPING.sub("", body)
            groups.append(f'<g class="frame a{number}" transform="translate({x},{y})">{body}</g>')
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}">\n<style>\n'
            "text { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; font-size: 20px; "
            "white-space: pre; }\n.frame { visibility: hidden; }\n" + "\n".join(styles) + "\n</style>\n"
            '<rect width="100%" height="100%" rx="8" fill="#111318"/>\n' + "\n".join(groups) + "\n</svg>\n"
        )
        path.write_text(re.sub(r"[ \t]+\n", "\n", text), encoding="utf-8")


def _keyframes(number: int, begin: float, end: float, total_s: float) -> str:
    """Return CSS that shows frame `number` from `begin` to `end`, in percent of `total_s` seconds."""
    frames = [f"{begin:.3f}% {{visibility:visible}}"]
    if begin > 0:
        frames.insert(0, "0% {visibility:hidden}")
    if end < 100:
        frames.append(f"{end:.3f}% {{visibility:hidden}}")
    rules = " ".join(frames)
    return f"@keyframes k{number} {{ {rules} }} .a{number} {{ animation: k{number} {total_s:.1f}s step-end infinite }}"
