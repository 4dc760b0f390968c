"""Runs a service as a process."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeVar

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, load_config
from midstream.errors import ExecutionError, MidstreamError
from midstream.telemetry import configure_logging

# Number of new objects after which generation 0 is collected, and number of these collections after which generation 1
# is collected. The latter examines up to three times as many objects and takes up to 25 ms.
_YOUNG_OBJECTS, _YOUNG_COLLECTIONS = 5_000, 2
# A full collection is due when, since the last one, the number of memory blocks has grown by this share of the blocks
# allocated since the start, and by at least this number (about 10 MB).
_GROWTH_SHARE, _MIN_GROWTH = 0.25, 100_000
_NEVER = 1_000_000_000

ConfigT = TypeVar("ConfigT", RouterConfig, SchedulerConfig, DetokenizerConfig)


@dataclass(frozen=True, slots=True)
class Service(Generic[ConfigT]):
    """A service that a process can host, alone or with others.

    Attributes:
        name: Name of its package.
        serve: Runs it until SIGTERM.
        prepare: Sets up the process before it is served.
    """

    name: str
    config_class: type[ConfigT]
    serve: Callable[[ConfigT], Coroutine[object, object, None]]
    prepare: Callable[[], None] = lambda: None


def run_service(service: Service[ConfigT]) -> int:
    """Serve with this process's configuration, and return the process's exit status.

    Returns:
        0 after SIGTERM; 1 if the service failed while it ran; 2 if a setting is invalid or a port is in use.
    """
    try:
        config = load_config(service.config_class, service.name)
        configure_logging(name_of(config, service), level=config.log_level, style=config.log_format)
        service.prepare()
        tune_collector()
        asyncio.run(service.serve(config))
    except (MidstreamError, OSError) as error:
        return report(service.name, error)
    return 0


def name_of(config: ConfigT, service: Service[ConfigT]) -> str:
    """Return the name of a service in the log."""
    return config.name or f"{service.name}:{config.port}"


def report(name: str, error: MidstreamError | OSError) -> int:
    """Print why a service has ended, and return the exit status of its process."""
    print(f"{name}: {error}", file=sys.stderr)
    return 1 if isinstance(error, ExecutionError) else 2


def tune_collector(min_growth: int = _MIN_GROWTH) -> None:
    """Exempt existing objects, most of which live as long as the process, from garbage collection; collect less often.

    With Python's defaults, collections take 6 to 8% of the CPU time of a scheduler and a router that serve many short
    requests. If only the first threshold is raised, collections of generation 1 stop a busy router for up to 96 ms.

    A full collection examines every object, for example those of the finished requests that a scheduler keeps (150 ms
    for 8,000 of them). These are not in reference cycles, so their memory is freed without the collector. Other objects
    may be, such as exceptions, and would let the process grow. A full collection therefore runs only once the process
    has grown, and soon enough that freeing the objects that it finds takes no longer than 50 ms.
    """
    num_first = sys.getallocatedblocks()
    max_blocks = 0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal max_blocks
        if phase != "stop" or not info["generation"]:
            return  # most collections are of generation 0, and counting the blocks takes up to 0.4 ms
        num_blocks = sys.getallocatedblocks()
        if info["generation"] == 2:
            max_blocks = num_blocks + max(int((num_blocks - num_first) * _GROWTH_SHARE), min_growth)
            gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)
        elif num_blocks > max_blocks:
            gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, 0)

    gc.freeze()
    gc.callbacks.append(on_collection)
    on_collection("stop", {"generation": 2})
