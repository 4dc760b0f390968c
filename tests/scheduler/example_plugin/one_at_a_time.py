"""A capacity policy of one's own: a worker group runs one request at a time."""

from __future__ import annotations

from scheduler.capacity_scheduler import CapacityScheduler, has_room_to_the_end
from scheduler.groups import WorkerGroup
from scheduler.request import Request


class OneAtATime(CapacityScheduler):
    """Starts a request only on an empty group."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Whether nothing runs there, and the request fits to its end."""
        return not group.active and has_room_to_the_end(request, group)
