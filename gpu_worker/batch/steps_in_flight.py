"""The steps that the compute loop has launched and not finished.

On a GPU a step runs while the next is received and launched, so the device has the next one before this one ends: the
loop takes a new step whenever one is there, and gives a result as soon as the device has it. Elsewhere a step is done
when it was launched, and its result comes first.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gpu_worker.batch.step import Step, StepOutput

# A result waits that long at most beside a queue that a step may come from.
_POLL_S = 1e-4
_MOST = 2

W = TypeVar("W")
LaunchedT = TypeVar("LaunchedT", bound="_Done")


class _Done(Protocol):
    @property
    def is_done(self) -> bool: ...


class Runner(Protocol[LaunchedT]):
    """What launches and finishes steps; see `ModelRunner`."""

    def launch(self, step: Step) -> LaunchedT:
        """Starts a step."""

    def finish(self, launched: LaunchedT) -> StepOutput:
        """What a step gave."""


@dataclass(frozen=True, slots=True)
class _InFlight(Generic[LaunchedT]):
    step: Step
    waiting_s: float
    launched: LaunchedT


class StepsInFlight(Generic[W, LaunchedT]):
    """Steps in the order of their launch."""

    def __init__(self, runner: Runner[LaunchedT], inbox: queue.SimpleQueue[W]) -> None:
        self._runner, self._inbox = runner, inbox
        self._steps: deque[_InFlight[LaunchedT]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def next(self) -> W | None:
        """What the inbox holds next; None: the result of the oldest step is to be taken first."""
        while self._steps:
            if self._steps[0].launched.is_done or len(self._steps) == _MOST:
                return None
            try:
                return self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return self._inbox.get()

    def launch(self, step: Step, waiting_s: float) -> None:
        """Launches a step that waited so long; raises what the runner raises."""
        self._steps.append(_InFlight(step, waiting_s, self._runner.launch(step)))

    def finish(self) -> tuple[Step, StepOutput, float]:
        """The oldest step, what it gave, and how long it waited before."""
        oldest = self._steps.popleft()
        return oldest.step, self._runner.finish(oldest.launched), oldest.waiting_s

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
