"""Reports the progress of loading: with a bar on a terminal, and with log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
_LINES = 4


def with_progress(items: Iterable[ItemT], total: int, text: str) -> Iterator[ItemT]:
    """Yield `items`, reporting progress out of `total`."""
    if sys.stderr.isatty():
        yield from track(items, total=total, description=text, console=Console(stderr=True), transient=True)
        return
    for i, item in enumerate(items, start=1):
        yield item
        if i * _LINES // total > (i - 1) * _LINES // total:
            logger.info("%s: %d of %d", text, i, total)
