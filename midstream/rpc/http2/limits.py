"""Limits on what a peer may demand of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a server; sizes in bytes.

    Attributes:
        max_concurrent_streams: Maximum number of concurrent calls on one connection.
        max_metadata_bytes: Maximum size of a call's metadata, counted as in HTTP/2.
        max_connections: Maximum number of connections; further ones are closed at once.
        handshake_timeout_s: Time for TLS, and then for the client's first frames.
        keepalive_s: Time without data after which the peer is pinged.
        keepalive_timeout_s: Time for the reply to a ping.
        min_ping_interval_s: Interval at which a peer may send pings while it receives nothing else.
        max_resets: Number of calls that a client may cancel at once.
        resets_per_s: Number of calls that a client may cancel per second in the long run.
        max_idle_frames: Number of frames without an effect, such as PRIORITY or empty DATA, that a client may send at
            once.
        idle_frames_per_s: Number of such frames that a client may send per second in the long run.
    """

    max_receive_bytes: int = 4 << 20
    max_send_bytes: int = 64 << 20
    max_concurrent_streams: int = 4096
    max_metadata_bytes: int = 16 << 10
    max_connections: int = 1 << 16
    max_connections_per_address: int = 1 << 15
    handshake_timeout_s: float = 10.0
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    min_ping_interval_s: float = 5.0
    max_resets: int = 8192
    resets_per_s: float = 500.0
    max_idle_frames: int = 2000
    idle_frames_per_s: float = 200.0


class Budget:
    """Counts events that may happen `burst` times at once and `rate` times per second in the long run."""

    __slots__ = ("_burst", "_left", "_rate", "_since")

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left: float = burst
        self._since = 0.0

    def spend(self, now: float) -> bool:
        """Count an event at time `now`; return whether it was within the budget."""
        if self._left < 1:
            self._left = min(self._burst, self._left + (now - self._since) * self._rate)
            self._since = now
        elif self._left == self._burst:
            self._since = now
        self._left -= 1
        return self._left >= 0
