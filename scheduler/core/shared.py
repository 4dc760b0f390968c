"""The state that the parts of a core share."""

from __future__ import annotations

from scheduler.core.config import CoreConfig
from scheduler.core.effects import Effect
from scheduler.core.fairness import Clients
from scheduler.core.queue import RequestQueue
from scheduler.core.stats import Totals
from scheduler.core.timers import Clock, Timers


class Shared:
    """The objects that each part of a core gets.

    Attributes:
        queue: Requests waiting for a group.
        totals: Totals since the start.
        effects: The effects of the current event so far.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.queue = RequestQueue(config.max_queue_size, config.tokens_per_block)
        self.timers = Timers()
        self.totals = Totals()
        self.clock = Clock()
        self.clients = Clients(self.clock)
        self.effects: list[Effect] = []
