"""Runs several services in one process: `python -m midstream.parts scheduler FLAGS + detokenizer FLAGS + router FLAGS`.

Each part has its own settings, ports, metrics and health, as in a process of its own; the connections between parts do
without sockets (midstream/rpc/local_connection.py). If one part fails, the process ends.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from midstream.config import load_config
from midstream.errors import ConfigError, ExecutionError, MidstreamError
from midstream.python_process import installed_module
from midstream.rpc.frames import local_servers
from midstream.rpc.serving import Signals, part_signals
from midstream.service import Service, name_of, report, tune_collector
from midstream.telemetry import configure_logging, current_part

SEPARATOR = "+"
# The services that can share a process, in the order in which they stop, and the time after which each is told again:
# routers wait for their streams, and without routers and detokenizers a scheduler's requests are read by nobody. Those
# that have not ended are in its journal, and continue at the next start.
_STOP_ORDER = {"router": None, "detokenizer": None, "scheduler": 2.0}
# Time for the other parts to release their ports when one has failed.
_ABANDON_S = 2.0


@dataclass(frozen=True, slots=True)
class Part:
    """A service in a process that hosts several.

    Attributes:
        kind: Name of its package.
        name: Its name in the log.
        serve: Runs it until it is told to stop.
    """

    kind: str
    name: str
    serve: Callable[[], Coroutine[object, object, None]]


class PartError(Exception):
    """A part has failed.

    Attributes:
        error: The reason.
    """

    def __init__(self, part: Part, error: BaseException) -> None:
        super().__init__(f"{part.name} failed: {error!r}")
        self.part, self.error = part, error


async def run_parts(parts: Sequence[Part]) -> None:
    """Run all parts in this event loop until SIGTERM or SIGINT; then drain and stop one after the other.

    Raises:
        PartError: A part has failed; the others were told to end.
    """
    running = _start(parts)
    stopping = asyncio.create_task(_stop_when_told(running), name="stop")
    waiting = {stopping, *(task for _, task, _ in running)}
    try:
        while not stopping.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for part, task, signals in running:
                if task not in done or task.cancelled():
                    continue
                error = task.exception()
                if error is None and not signals.num_sent:
                    error = ExecutionError("it ended without being told to")
                if error is not None:
                    raise PartError(part, error)
        await stopping
    finally:
        stopping.cancel()
        left = [task for _, task, _ in running if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_ABANDON_S)


_Running = tuple[Part, asyncio.Task[Any], Signals]


def _start(parts: Sequence[Part]) -> list[_Running]:
    """Start all parts, each in a context of its own."""
    context = copy_context()
    context.run(local_servers.set, [])
    running = []
    for part in parts:
        own, signals = context.copy(), Signals()
        own.run(part_signals.set, signals)
        own.run(current_part.set, part.name)
        running.append((part, asyncio.create_task(part.serve(), name=part.name, context=own), signals))
    return running


async def _stop_when_told(running: Sequence[_Running]) -> None:
    for _, _, signals in running:
        await signals.are_awaited.wait()
    # Until now, a signal has ended the process, as it does to a service that starts.
    told: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.put_nowait, number)
    first = await told.get()
    again = asyncio.create_task(told.get(), name="second signal")
    try:
        for kind, limit_s in _STOP_ORDER.items():
            for part, task, signals in running:
                if part.kind == kind:
                    signals.send(first)
                    await asyncio.wait((task, again), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                    signals.send(signal.SIGTERM)  # no effect if it has ended
                    await asyncio.wait((task,))
    finally:
        again.cancel()


def main(arguments: Sequence[str]) -> int:
    """Run the parts that `arguments` name, and return the exit status as `run_service` does."""
    kind = "parts"
    try:
        parts: list[Part] = []
        configs = []
        for is_separator, words in itertools.groupby(arguments, SEPARATOR.__eq__):
            if is_separator:
                continue
            kind, *flags = words
            if kind not in _STOP_ORDER or any(part.kind == kind for part in parts):
                raise ConfigError(f"name each of {', '.join(_STOP_ORDER)} at most once", field=kind)
            service: Service[Any] = importlib.import_module(installed_module(f"{kind}.__main__")).SERVICE
            config = load_config(service.config_class, kind, flags)
            service.prepare()
            configs.append(config)
            parts.append(Part(kind, name_of(config, service), partial(service.serve, config)))
        if len({(config.log_level, config.log_format) for config in configs}) != 1:
            raise ConfigError("must be the same for all parts of a process", field="log_level, log_format")
        names = SEPARATOR.join(part.name for part in parts)
        configure_logging(names, level=configs[0].log_level, style=configs[0].log_format)
        tune_collector()
        asyncio.run(run_parts(parts))
    except PartError as failed:
        if not isinstance(failed.error, (MidstreamError, OSError)):
            raise failed.error from None
        return report(failed.part.kind, failed.error)
    except (MidstreamError, OSError) as error:
        return report(kind, error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
