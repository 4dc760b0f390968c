"""`python -m scheduler`."""

from __future__ import annotations

import asyncio
import sys

from midstream.config import SchedulerConfig, load_config
from midstream.errors import ConfigError, ExecutionError
from midstream.telemetry import configure_logging
from scheduler.service import SchedulerService


async def _serve(config: SchedulerConfig) -> None:
    await SchedulerService(config).run()


def main() -> int:
    """Run a scheduler until SIGTERM."""
    try:
        config = load_config(SchedulerConfig, "scheduler")
        configure_logging(config.name or f"scheduler:{config.port}", level=config.log_level, style=config.log_format)
        asyncio.run(_serve(config))
    except (ConfigError, OSError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 2
    except ExecutionError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
