"""A stand-in for a CUDA stream on which nothing happens until somebody waits for it.

A real device may be this slow. Code that changes memory which an asynchronous copy has yet to read is then wrong each
time, not once in a while.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from gpu_worker.batch import staging


class LazyStream:
    """Work in the order of its launch, to which asynchronous copies and the events of staging buffers belong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_done = self.num_waits = 0
        self._work: list[Callable[[], object]] = []
        copy = Tensor.copy_

        def copy_later(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(target, source)
            self.launch(lambda: copy(target, source))
            return target

        monkeypatch.setattr(Tensor, "copy_", copy_later)
        monkeypatch.setattr(staging, "_event", lambda device: LazyEvent(self))

    @property
    def num_launched(self) -> int:
        return len(self._work)

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def run(self, count: int) -> None:
        """Do all work up to the first `count`."""
        while self.num_done < count:
            self.num_done += 1
            self._work[self.num_done - 1]()

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Stand in for the recorder of a graph: a replay is work."""
        run()
        return lambda: self.launch(run)


class LazyEvent:
    def __init__(self, stream: LazyStream) -> None:
        self._stream, self._place = stream, 0

    def record(self) -> None:
        self._place = self._stream.num_launched

    def query(self) -> bool:
        return self._stream.num_done >= self._place

    def synchronize(self) -> None:
        self._stream.num_waits += not self.query()
        self._stream.run(self._place)
