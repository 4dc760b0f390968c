"""A disk that loses power, or whose process is killed, in the middle of any operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from scheduler.journal.log_folder import LogFolder
from tests.simulation.disk import Disk, File

PATH = "/journal"


class PowerCut(BaseException):
    """The process dies in the middle of a file operation."""


class InterruptedDisk(Disk):
    """A disk whose operations can be interrupted.

    Attributes:
        operations_left: Number of changes and syncs until a PowerCut is raised; if negative, none is raised.
        meanwhile: Called during each operation; stands in for another process that runs at that time.
    """

    def __init__(self) -> None:
        super().__init__(self._operate)
        self.operations_left = -1
        self.meanwhile: Callable[[], None] = lambda: None

    def _operate(self, operation: str) -> None:
        self.meanwhile()
        if operation == "other":
            return
        if self.operations_left == 0:
            self.operations_left = -1
            raise PowerCut
        self.operations_left -= self.operations_left > 0

    @property
    def is_locked(self) -> bool:
        lock = self.find(f"{PATH}/lock")
        return isinstance(lock, File) and lock.holder is not None

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Let LogFolder use this disk within this context."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("scheduler.journal.log_folder.os", self.os)
            patch.setattr("scheduler.journal.log_folder.fcntl", self.fcntl)
            yield

    def folder(self, path: str = PATH) -> LogFolder:
        """Return the folder as seen by one process."""
        return LogFolder(self.path_type()(path))  # type: ignore[arg-type]  # it has the methods that are used
