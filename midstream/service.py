"""Runs a service as a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, load_config
from midstream.errors import ExecutionError, MidstreamError
from midstream.telemetry import configure_logging

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
        asyncio.run(serve(config))
    except ExecutionError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (MidstreamError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
