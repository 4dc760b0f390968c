"""Measures the speed of a streaming answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from midstream.chunk import Chunk


@dataclass(slots=True)
class Pace:
    """Measures the speed of one stream, starting at construction.

    Attributes:
        first_s: Seconds to the first token; None before it arrives.
        last_s: Seconds to the latest token.
    """

    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    reason: str = ""
    _clock: Callable[[], float] = time.monotonic
    _started: float = 0.0
    _num_first: int = 0

    def __post_init__(self) -> None:
        self._started = self._clock()

    def note(self, chunk: Chunk) -> None:
        """Record a chunk that has just arrived."""
        if chunk.token_ids:
            self.last_s = self._clock() - self._started
            self.num_tokens += len(chunk.token_ids)
            if self.first_s is None:
                self.first_s, self._num_first = self.last_s, self.num_tokens
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason.value

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first chunk; 0 before the second chunk."""
        if self.first_s is None or self.last_s <= self.first_s:
            return 0.0
        return (self.num_tokens - self._num_first) / (self.last_s - self.first_s)

    def __str__(self) -> str:
        if self.first_s is None:
            return self.reason or "waiting"
        parts = [f"{self.num_tokens} tokens", f"{self.tokens_per_s:.0f} tok/s", f"first after {self.first_s:.2f} s"]
        return ", ".join([*parts, self.reason] if self.reason else parts)
