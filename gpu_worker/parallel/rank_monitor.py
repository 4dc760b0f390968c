"""Ends a rank when another rank of its group is killed, stopped or disconnected.

Each follower has a connection to rank 0 on which both sides send heartbeats from a separate thread, because the main
threads may wait for each other. A dead process closes its connections; a lost host is detected by missing heartbeats.
In either case this process exits immediately: it may be blocked in an operation with the other rank that cannot be
cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

LOST_EXIT_CODE = 4
_SIGN, _DRAIN = b".", b"d"
_SIGNS_PER_TIMEOUT = 5


def end_process(reason: str) -> None:
    """End this process immediately, even if its threads are blocked."""
    logger.error("the group failed: %s", reason)
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


class RankMonitor:
    """Monitors the connections to other ranks in a thread."""

    def __init__(
        self, peers: Mapping[int, socket.socket], timeout_s: float, on_lost: Callable[[str], None] = end_process
    ) -> None:
        """Start monitoring.

        Args:
            peers: Connections by rank.
            timeout_s: Seconds without a heartbeat after which a rank counts as lost.
            on_lost: Called once with a message that names the lost rank.
        """
        self._peers, self._timeout_s, self._on_lost = dict(peers), timeout_s, on_lost
        self._on_drain: Callable[[], None] | None = None
        self._is_stuck: Callable[[], bool] = lambda: False
        self._is_closing = self._wants_drain = False
        self._thread = threading.Thread(target=self._run, name="rank-monitor", daemon=True)
        for connection in self._peers.values():
            connection.setblocking(False)
        self._thread.start()

    def on_drain(self, call: Callable[[], None]) -> None:
        """Set the callback for drain requests from other ranks; call it now if one has already been received."""
        self._on_drain = call
        if self._wants_drain:
            call()

    def watch(self, is_stuck: Callable[[], bool]) -> None:
        """Treat this process as lost when `is_stuck` returns true, since a rank may be alive without responding."""
        self._is_stuck = is_stuck

    def ask_drain(self) -> None:
        """Ask rank 0 to finish the current work and end the group."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(_DRAIN)

    def expect_end(self) -> None:
        """Stop counting disconnections as failures."""
        self._is_closing = True

    def close(self) -> None:
        """Wait up to the time limit until the other ranks have closed their connections, then close this side's."""
        self._is_closing = True
        self._thread.join(self._timeout_s)
        for connection in self._peers.values():
            connection.close()

    def leave(self) -> None:
        """Close this side's connections without waiting for the other ranks."""
        self._is_closing = True
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        interval_s = self._timeout_s / _SIGNS_PER_TIMEOUT
        heard = dict.fromkeys(self._peers, time.monotonic())
        next_sign = 0.0
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                now = time.monotonic()
                if now >= next_sign:
                    next_sign = now + interval_s
                    self._send_signs()
                for key, _ in selector.select(next_sign - now):
                    if self._hear(key.data):
                        heard[key.data] = time.monotonic()
                    else:
                        selector.unregister(key.fileobj)
                        if not self._is_closing:
                            self._on_lost(f"rank {key.data} disconnected")
                            return
                if self._is_stuck() and not self._is_closing:
                    self._on_lost("a step is stuck")
                    return
                silent = [rank for rank, since in heard.items() if time.monotonic() - since > self._timeout_s]
                if silent and not self._is_closing:
                    self._on_lost(f"rank {silent[0]} sent no heartbeat for {self._timeout_s:g} s")
                    return

    def _hear(self, rank: int) -> bool:
        """Read the received bytes; return False at the end of the connection."""
        try:
            data = self._peers[rank].recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if _DRAIN in data:
            self._wants_drain = True
            if self._on_drain is not None:
                self._on_drain()
        return bool(data)

    def _send_signs(self) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # a full or closed connection is handled elsewhere
                connection.send(_SIGN)
