"""Runs a service as a process."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, load_config
from midstream.errors import ExecutionError, MidstreamError
from midstream.telemetry import configure_logging

# New objects per collection of generation 0, its collections per collection of generation 1, and so on. A collection of
# generation 1 looks at up to three times as many objects, which takes up to 25 ms.
_COLLECTOR_THRESHOLDS = (5_000, 2, 40)

ConfigT = TypeVar("ConfigT", RouterConfig, SchedulerConfig, DetokenizerConfig)


def run_service(
    config_class: type[ConfigT], name: str, serve: Callable[[ConfigT], Coroutine[object, object, None]]
) -> int:
    """Run `serve` with this process's configuration, and return the process's exit status.

    Returns:
        0 after SIGTERM; 1 if the service failed while it ran; 2 if a setting is invalid or a port is in use.
    """
    try:
        config = load_config(config_class, name)
        configure_logging(config.name or f"{name}:{config.port}", level=config.log_level, style=config.log_format)
        _tune_collector()
        asyncio.run(serve(config))
    except ExecutionError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (MidstreamError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


def _tune_collector() -> None:
    """Exempt the objects that exist now, most of which live as long as the process, and collect less often.

    With Python's defaults, collections take 6 to 8% of the CPU time of a scheduler and a router that serve many short
    requests. If only the first threshold is raised, collections of generation 1 stop a busy router for up to 96 ms.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
