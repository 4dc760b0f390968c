"""Health of the router: it is unhealthy if it cannot reach the components that requests need."""

from __future__ import annotations

import asyncio
import math

from midstream.rpc.health import Progress
from router.pipeline.cells import Cells
from router.pipeline.detokenizer_pool import DetokenizerPool

_LOOK_S = 0.5
# A killed process restarts sooner than this; until then requests wait in the router.
UNREACHED_S = 10.0


async def watch_reach(
    cells: Cells, pool: DetokenizerPool, progress: Progress, *, unreached_s: float = UNREACHED_S
) -> None:
    """Report the router as unhealthy until a scheduler, a worker and a detokenizer have responded, and whenever all
    components of one kind have been silent for `unreached_s`.

    A scheduler has responded when its load report, which also covers its workers, arrives over the connection used for
    requests.
    """
    loop = asyncio.get_running_loop()
    seen = dict.fromkeys(("no scheduler responds", "no worker is connected", "no detokenizer responds"), -math.inf)
    while True:
        now = loop.time()
        up = [cell for cell in cells.cells.values() if cell.is_up]
        reached = (bool(up), any(cell.has_workers for cell in up), pool.num_live > 0)
        for reason, is_reached in zip(seen, reached, strict=True):
            if is_reached:
                seen[reason] = now
            progress.set_reason(reason, stands=now - seen[reason] > unreached_s)
        await asyncio.sleep(_LOOK_S)
