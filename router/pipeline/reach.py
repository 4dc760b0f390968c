"""Whether this router reaches the parts that requests need: health that answers while they time out misleads."""

from __future__ import annotations

import asyncio

from midstream.rpc.health import Progress
from router.pipeline.cells import Cells
from router.pipeline.detokenizer_pool import DetokenizerPool

_LOOK_S = 0.5
# A part that was killed is back sooner; meanwhile requests wait for it here.
UNREACHED_S = 10.0


async def watch_reach(
    cells: Cells, pool: DetokenizerPool, progress: Progress, *, unreached_s: float = UNREACHED_S
) -> None:
    """Keep a reason against health while no scheduler, or no detokenizer, has answered for `unreached_s`.

    A scheduler answers when its loads come back over the connection that requests take.
    """
    loop = asyncio.get_running_loop()
    seen = {"no scheduler answers": loop.time(), "no detokenizer answers": loop.time()}
    while True:
        now = loop.time()
        reached = (any(cell.is_up for cell in cells.cells.values()), pool.num_live > 0)
        for reason, is_reached in zip(seen, reached, strict=True):
            if is_reached:
                seen[reason] = now
            progress.set_reason(reason, stands=now - seen[reason] > unreached_s)
        await asyncio.sleep(_LOOK_S)
