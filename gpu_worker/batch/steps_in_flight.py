"""The steps that the compute loop has launched but not yet finished.

On a GPU, the next step is received and launched while the current one runs, so that the device does not become idle:
the loop launches a step as soon as it arrives, and finishes a step as soon as its result is available. On a CPU a step
is complete when launch returns, and its result is delivered before the next step is launched.

In a pipeline of CPU ranks, a step that has arrived is launched if it has no rows in common with those in flight;
otherwise the loop waits for the oldest step.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gpu_worker.batch.step import Step, StepOutput

# Maximum time to wait for a result before the inbox is checked for a new step.
_POLL_S = 1e-4
MOST = 2

W = TypeVar("W")
LaunchedT = TypeVar("LaunchedT", bound="_Done")


class _Done(Protocol):
    @property
    def is_done(self) -> bool: ...

    @property
    def is_silent(self) -> bool: ...


class Runner(Protocol[LaunchedT]):
    """Launches and finishes steps; see `ModelRunner`."""

    def launch(self, step: Step) -> LaunchedT:
        """Start a step."""

    def finish(self, launched: LaunchedT) -> StepOutput:
        """Return the output of a launched step, after waiting for it."""


@dataclass(frozen=True, slots=True)
class _InFlight(Generic[LaunchedT]):
    step: Step
    waiting_s: float
    launched: LaunchedT


class StepsInFlight(Generic[W, LaunchedT]):
    """Launched steps in the order of their launch."""

    def __init__(self, runner: Runner[LaunchedT], inbox: queue.SimpleQueue[W], most: int = MOST) -> None:
        """Create the object, without steps; at most `most` are in flight."""
        self._runner, self._inbox, self._most = runner, inbox, most
        self._steps: deque[_InFlight[LaunchedT]] = deque()

    def use_runner(self, runner: Runner[LaunchedT]) -> None:
        """Launch further steps with another runner. Precondition: there are no steps."""
        self._runner = runner

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> Step:
        return self._steps[0].step

    def next(self) -> W | None:
        """Return the next item of the inbox, or None if the oldest step must be finished first."""
        while self._steps:
            oldest = self._steps[0].launched
            if oldest.is_done or len(self._steps) == self._most:
                return None
            try:
                return self._inbox.get_nowait() if oldest.is_silent else self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                if oldest.is_silent:
                    return None
        return self._inbox.get()

    def launch(self, step: Step, waiting_s: float) -> None:
        """Launch a step that has waited for `waiting_s` seconds; exceptions of the runner propagate."""
        self._steps.append(_InFlight(step, waiting_s, self._runner.launch(step)))

    def finish(self) -> tuple[Step, StepOutput, float]:
        """Finish the oldest step; return the step, its output, and how long it had waited before its launch."""
        oldest = self._steps.popleft()
        return oldest.step, self._runner.finish(oldest.launched), oldest.waiting_s

    def clear(self) -> None:
        self._steps.clear()
