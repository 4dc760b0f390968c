"""What a simulation of a recording changes: settings, the number of workers, and when workers die."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from midstream.errors import ConfigError
from scheduler.core.config import CoreConfig
from scheduler.core.events import Event, WorkerLeft, WorkerLost, WorkerRegistered
from scheduler.core.role import Role

_NS_PER_UNIT = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)")


def duration_ns(text: str) -> int:
    """Return a time such as `80ms`, `1.5s` or `2m` in nanoseconds. Raises ValueError if it is none."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 80ms or 1.5s")
    return int(float(match[1]) * _NS_PER_UNIT[match[2]])


@dataclass(frozen=True, slots=True)
class Kill:
    """The death of a worker.

    Attributes:
        at_ns, back_ns: When it dies and when its successor registers, since the start of the recording; `back_ns` is
            None if it has no successor.
    """

    group_id: str
    at_ns: int
    back_ns: int | None = None

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Return the death that `NAME@TIME` or `NAME@TIME-TIME` describes. Raises ValueError if it is neither."""
        group_id, _, times = text.rpartition("@")
        first, *others = times.split("-", 1)
        if not group_id:
            raise ValueError(f"{text!r} is not NAME@TIME, such as worker-0@12s, or NAME@TIME-TIME")
        at_ns, back_ns = duration_ns(first), duration_ns(others[0]) if others else None
        if back_ns is not None and back_ns <= at_ns:
            raise ValueError(f"{text!r}: the worker must come back after its death")
        return cls(group_id, at_ns, back_ns)

    def __str__(self) -> str:
        back = "" if self.back_ns is None else f"-{self.back_ns / 1e9:g}s"
        return f"{self.group_id}@{self.at_ns / 1e9:g}s{back}"


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes; None, 0 and nothing mean as recorded."""

    policy: str | None = None
    batching_type: str | None = None
    max_num_tokens: int = 0
    max_batch_size: int = 0
    num_blocks: int = 0
    workers: int = 0
    kill: Sequence[Kill] = ()

    def __bool__(self) -> bool:
        return self != Changes()

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["kill"] = " ".join(map(str, self.kill))
        return "\n".join(f"{name} {value}" for name, value in values.items() if value)

    def config(self, recorded: CoreConfig) -> CoreConfig:
        """Return the settings of the simulated core. Simulated workers are always right, so none is verified."""
        return replace(
            recorded,
            max_num_tokens=self.max_num_tokens or recorded.max_num_tokens,
            max_batch_size=self.max_batch_size or recorded.max_batch_size,
            verify_ppm=0,
        )

    def events(self, recorded: Sequence[Event], begin_ns: int) -> list[Event]:
        """Return the external events of the simulation, in order of their times.

        Args:
            recorded: The recorded ones.
            begin_ns: Start of the recording.

        Raises:
            ConfigError: A worker to kill is not registered at that time.
        """
        events = [self._limited(event) if isinstance(event, WorkerRegistered) else event for event in recorded]
        if self.workers:
            first = next(event for event in events if isinstance(event, WorkerRegistered))
            others = [event for event in events if not isinstance(event, WorkerRegistered | WorkerLeft)]
            events = [*_like(first, self.workers), *others]
        for number, kill in enumerate(sorted(self.kill, key=lambda kill: kill.at_ns)):
            events += _death(events, kill, begin_ns, number)
        return sorted(events, key=lambda event: event.time_ns)

    def _limited(self, registered: WorkerRegistered) -> WorkerRegistered:
        return replace(
            registered,
            max_num_tokens=self.max_num_tokens or registered.max_num_tokens,
            max_batch_size=self.max_batch_size or registered.max_batch_size,
            num_blocks=self.num_blocks or registered.num_blocks,
        )


def _like(first: WorkerRegistered, count: int) -> list[Event]:
    """Return registrations of this many workers like a recorded one."""
    return [
        replace(
            first,
            connection=b"worker %d" % number,
            group_id=f"worker-{number}",
            incarnation=number + 1,
            role=Role.BOTH,
            kv_source="",
            kept_blocks=(),
            kept_hashes=(),
        )
        for number in range(count)
    ]


def _death(events: Sequence[Event], kill: Kill, begin_ns: int, number: int) -> list[Event]:
    """Return the death of a worker, and the registration of its successor if there is one."""
    at_ns = begin_ns + kill.at_ns
    earlier = [event for event in events if isinstance(event, WorkerRegistered) and event.time_ns <= at_ns]
    last = {event.group_id: event for event in sorted(earlier, key=lambda event: event.time_ns)}.get(kill.group_id)
    if last is None:
        known = ", ".join(sorted({event.group_id for event in earlier})) or "none"
        raise ConfigError(f"{kill}: no such worker is registered at that time, only {known}", field="--kill")
    found: list[Event] = [WorkerLost(at_ns, last.connection)]
    if kill.back_ns is not None:
        found.append(
            replace(
                last,
                time_ns=begin_ns + kill.back_ns,
                connection=b"%s after death %d" % (last.connection, number + 1),
                incarnation=(1 << 62) + number,
                kept_blocks=(),
                kept_hashes=(),
            )
        )
    return found
