"""Ends a rank when another one of its group is gone: killed, stopped, or cut off.

Each follower has a connection to rank 0 over which both send a sign of life every now and then, from threads of their
own, for the ranks' main threads may be waiting for each other. A process that dies closes its connections; silence
tells of hosts that are gone. What follows is the end of this process at once: it may be waiting for the other one
inside an operation that cannot be called off.
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
    """Ends this process, whatever its threads wait for."""
    logger.error("the group ends: %s", reason)
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


class Lifelines:
    """Watches connections to other ranks, from a thread."""

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        timeout_s: float,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """Starts to watch.

        Args:
            peers: Connections by rank.
            timeout_s: Silence after which a rank counts as gone.
            on_lost: Called, once, with a sentence that says which.
        """
        self._peers, self._timeout_s, self._on_lost = dict(peers), timeout_s, on_lost
        self._on_drain: Callable[[], None] | None = None
        self._is_stuck: Callable[[], bool] = lambda: False
        self._is_closing = self._wants_drain = False
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        for connection in self._peers.values():
            connection.setblocking(False)
        self._thread.start()

    def on_drain(self, call: Callable[[], None]) -> None:
        """What to do when another rank asks for the end; at once, if one did."""
        self._on_drain = call
        if self._wants_drain:
            call()

    def watch(self, is_stuck: Callable[[], bool]) -> None:
        """Counts this process as lost when it does not get on: another rank may live and yet not answer."""
        self._is_stuck = is_stuck

    def ask_drain(self) -> None:
        """Asks rank 0 to finish what is at hand and to end the group."""
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.send(_DRAIN)

    def expect_end(self) -> None:
        """From now on it is no loss when a rank goes."""
        self._is_closing = True

    def close(self) -> None:
        """Lets the others go first: waits for the end of their connections, up to the time limit."""
        self._is_closing = True
        self._thread.join(self._timeout_s)
        for connection in self._peers.values():
            connection.close()

    def leave(self) -> None:
        """Closes this side's connections without waiting for the others."""
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
                            self._on_lost(f"rank {key.data} is gone")
                            return
                if self._is_stuck() and not self._is_closing:
                    self._on_lost("a step does not end")
                    return
                silent = [rank for rank, since in heard.items() if time.monotonic() - since > self._timeout_s]
                if silent and not self._is_closing:
                    self._on_lost(f"rank {silent[0]} has been silent for {self._timeout_s:g} s")
                    return

    def _hear(self, rank: int) -> bool:
        """Reads what has come; False at the end of the connection."""
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
            with contextlib.suppress(OSError):  # a full or closed connection shows otherwise
                connection.send(_SIGN)
