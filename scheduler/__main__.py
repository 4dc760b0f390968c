"""Run a scheduler: `python -m scheduler`."""

from __future__ import annotations

import sys

from midstream.config import SchedulerConfig
from midstream.service import Service, run_service
from scheduler.service import SchedulerService


async def serve(config: SchedulerConfig) -> None:
    """Run the service until SIGTERM."""
    await SchedulerService(config).run()


SERVICE = Service("scheduler", SchedulerConfig, serve)

if __name__ == "__main__":
    sys.exit(run_service(SERVICE))
