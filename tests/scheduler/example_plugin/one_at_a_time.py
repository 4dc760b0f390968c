"""Example capacity policy: a worker group runs one request at a time."""

from __future__ import annotations

from scheduler.core.capacity_scheduler import CapacityScheduler, has_room_to_the_end
from scheduler.core.request import Request
from scheduler.core.worker_group import WorkerGroup


class OneAtATime(CapacityScheduler):
    """Starts a request only on an empty group."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the group is empty and the request fits until its end."""
        return not group.active and has_room_to_the_end(request, group)
