"""Spreads refusals over time.

Ending a call takes the event loop a fraction of a millisecond. Without this, a thousand calls that began together and
waited in vain would also end together, and other requests would wait for that.
"""

from __future__ import annotations

import asyncio

_INTERVAL_S = 0.005


class Refusals:
    """Lets one refused call end at a time."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the next call may end."""
        now = asyncio.get_running_loop().time()
        own = max(self._next, now)
        self._next = own + self._interval_s
        await asyncio.sleep(own - now)
