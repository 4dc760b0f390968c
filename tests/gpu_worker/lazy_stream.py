"""Stand-ins for a CUDA stream that do no work until the host waits for it.

A real device may be as slow as this. Code that modifies memory which an asynchronous copy has yet to read therefore
fails every time instead of occasionally.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_worker.batch import staging


class LazyStream:
    """A queue of work items in launch order, including asynchronous copies and the events of staging buffers."""

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
        """Run the first `count` work items."""
        while self.num_done < count:
            self.num_done += 1
            self._work[self.num_done - 1]()

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        """Stand in for the graph recorder: a replay queues the recorded work."""
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


class LateReader:
    """A stand-in for a device that performs each copy as late as possible: when the host waits for its event.

    All other work is done immediately, so a whole runner works with it. It raises an error if a buffer changes between
    the start of its copy and the wait for the copy; until then, the destination of a copy to the host contains garbage.
    With `catches_up`, a wait for any work completes all work that has started.
    """

    NONSENSE = -987654321

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, catches_up: bool) -> None:
        self.num_to_device = self.num_to_host = 0
        self.catches_up = catches_up
        self._pending: list[Callable[[], object]] = []
        self._num_done = 0
        start, send = staging.Readback.start, staging.PinnedBuffers.send

        def send_late(buffers: staging.PinnedBuffers, source: Tensor, target: Tensor) -> None:
            seen = source.clone()
            self.num_to_device += 1

            def check() -> None:
                assert torch.equal(source, seen), "a pinned buffer was overwritten before its copy was done"

            self._pending.append(check)
            send(buffers, source, target)

        def start_late(readback: staging.Readback, values: Tensor) -> staging.Copy:
            self._pending.append(lambda: None)  # the copy precedes its event
            place = len(self._pending) - 1
            copy = start(readback, values)
            numbers = copy._values.numpy()
            given = numbers.copy()
            numbers[:] = self.NONSENSE
            self.num_to_host += 1
            self._pending[place] = lambda: numbers.__setitem__(slice(None), given)
            return copy

        monkeypatch.setattr(staging.PinnedBuffers, "send", send_late)
        monkeypatch.setattr(staging.Readback, "start", start_late)
        monkeypatch.setattr(staging, "_event", lambda device: LateEvent(self))

    @property
    def num_started(self) -> int:
        return len(self._pending)

    def run(self, count: int) -> None:
        """Perform the first `count` copies."""
        while self._num_done < count:
            self._num_done += 1
            self._pending[self._num_done - 1]()

    def is_done(self, count: int) -> bool:
        return self._num_done >= count


class LateEvent:
    def __init__(self, reader: LateReader) -> None:
        self._reader, self._place = reader, 0

    def record(self) -> None:
        self._place = self._reader.num_started

    def query(self) -> bool:
        return self._reader.is_done(self._place)

    def synchronize(self) -> None:
        self._reader.run(self._reader.num_started if self._reader.catches_up else self._place)
