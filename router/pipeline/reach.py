"""Health of the router: it is unhealthy if it cannot reach the components that requests need."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from midstream.rpc.health import Progress
from router.pipeline.cells import Cells
from router.pipeline.detokenizer_pool import DetokenizerPool

_LOOK_S = 0.5
# A killed process restarts sooner than this; until then requests wait in the router.
UNREACHED_S = 10.0


class Reach:
    """Whether the components that requests to one model need respond.

    Attributes:
        problems: What has not responded yet, or has been silent for `unreached_s`.
    """

    def __init__(self, cells: Cells, pool: DetokenizerPool, *, unreached_s: float = UNREACHED_S) -> None:
        self._cells, self._pool, self._unreached_s = cells, pool, unreached_s
        reasons = ("no scheduler responds", "no worker is connected", "no detokenizer responds")
        self._seen = dict.fromkeys(reasons, -math.inf)
        self.problems: list[str] = list(reasons)

    def look(self) -> None:
        """Update `problems`.

        A scheduler has responded when its load report, which also covers its workers, arrives over the connection used
        for requests.
        """
        now = asyncio.get_running_loop().time()
        up = [cell for cell in self._cells.cells.values() if cell.is_up]
        reached = (bool(up), any(cell.has_workers for cell in up), self._pool.num_live > 0)
        for reason, is_reached in zip(self._seen, reached, strict=True):
            if is_reached:
                self._seen[reason] = now
        self.problems = [reason for reason, seen in self._seen.items() if now - seen > self._unreached_s]


async def watch_reach(models: Mapping[str, Reach], progress: Progress) -> None:
    """Report the router as unhealthy while no request to any of its models, given by name, could run: until a
    scheduler, a worker and a detokenizer of one of them have responded, and whenever all components of one kind have
    been silent for a while, in each of them.
    """
    reported: set[str] = set()
    while True:
        for reach in models.values():
            reach.look()
        is_usable = not all(reach.problems for reach in models.values())
        found = set() if is_usable else set(unreached(models))
        for reason in reported | found:
            progress.set_reason(reason, stands=reason in found)
        reported = found
        await asyncio.sleep(_LOOK_S)


def unreached(models: Mapping[str, Reach]) -> list[str]:
    """Return what does not respond, with the name of its model if there are several."""
    return [
        f"{name}: {problem}" if len(models) > 1 else problem
        for name, reach in models.items()
        for problem in reach.problems
    ]
