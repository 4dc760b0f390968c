"""Connects to the scheduler's ZeroMQ socket, and detects lost or rejected connections."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from midstream.errors import ConfigError
from midstream.security.curve import WorkerCredentials

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_REJECTED_RETRY_S = 1.0
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 200
_LINGER_MS = 1000
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
LINK_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | _REFUSED
_ONE_OF = "one-of:"
# A worker tries the next scheduler if the current one has not replied within this time. It is long enough for a busy
# scheduler: a late reply would register a worker that has already moved on to another one.
_REPLY_S = 2.0


class Connector:
    """Manages the connection to the scheduler; with `one-of:` addresses, to the active one of several."""

    def __init__(self, address: str, credentials: WorkerCredentials | None) -> None:
        """Prepare the connection; `credentials` are its keys, None for plain text.

        Raises:
            ConfigError: An address after `one-of:` is not a host or an IPv4 address with a port.
        """
        for target in _targets(address):
            host, _, port = target.removeprefix("tcp://").rpartition(":")
            if not port.isdigit() or not host or "[" in host:
                raise ConfigError(f"{target!r} is not tcp://host:port", field="scheduler")
        self._setting = address
        self._address = ""  # the address in use
        self._next_at = math.inf
        self._credentials = credentials
        self._was_refused = False
        self._reconnect_at = 0.0

    def connect(self, dealer: zmq.Socket[bytes]) -> None:
        """Configure and connect a DEALER socket; from then on ZeroMQ reconnects it."""
        dealer.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while disconnected
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.LINGER, _LINGER_MS)
        if self._credentials is not None:
            self._credentials.secure(dealer)
        self._connect_next(dealer)

    def was_lost(self, monitor: zmq.Socket[bytes]) -> bool:
        """Return whether the connection has been lost since the last call; `monitor` must report LINK_EVENTS."""
        was_lost = False
        while True:
            try:
                message = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event = parse_monitor_message(message)["event"]
            if event == zmq.EVENT_CONNECT_RETRIED:  # this scheduler is down, or a standby
                self._next_at = min(self._next_at, time.monotonic() + _MAX_RECONNECT_MS / 1000)
                continue
            was_lost = was_lost or event == zmq.EVENT_DISCONNECTED
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._reconnect_at = time.monotonic() + _REJECTED_RETRY_S
            if event != zmq.EVENT_DISCONNECTED and not self._was_refused:
                self._was_refused = True
                logger.warning(
                    "handshake failed: the scheduler rejects this worker's key, or its own key is not the expected one"
                )
        return was_lost

    def reconnect_when_due(self, dealer: zmq.Socket[bytes]) -> None:
        """Reconnect after a rejection, which ZeroMQ treats as final although the key may have been allowed since;
        connect to the next scheduler if the current one has not replied.
        """
        now = time.monotonic()
        is_next = self._setting.startswith(_ONE_OF) and now >= self._next_at
        if is_next or (self._reconnect_at and now >= self._reconnect_at):
            self._reconnect_at = 0.0
            with contextlib.suppress(zmq.ZMQError):
                dealer.disconnect(self._address)
            self._connect_next(dealer)

    def note_registered(self) -> None:
        """Record a successful registration, so that the next rejection is logged again."""
        self._was_refused = False
        self._next_at = math.inf

    def note_lost(self) -> None:
        """Record the end of a registration."""
        self._next_at = time.monotonic() + _REPLY_S

    def _connect_next(self, dealer: zmq.Socket[bytes]) -> None:
        addresses = _addresses(self._setting) or [self._address]
        position = addresses.index(self._address) + 1 if self._address in addresses else 0
        self._address = addresses[position % len(addresses)]
        self._next_at = time.monotonic() + _REPLY_S
        if self._address:
            dealer.connect(self._address)


def _addresses(setting: str) -> list[str]:
    """Return the addresses in a setting; the names after `one-of:` are resolved."""
    if not setting.startswith(_ONE_OF):
        return [setting]
    found: list[str] = []
    for target in _targets(setting):
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        try:
            infos = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            logger.warning("cannot resolve %s: %s", target, error)
            continue
        found.extend(sorted({f"tcp://{info[4][0]}:{port}" for info in infos}))
    return found


def _targets(setting: str) -> list[str]:
    if not setting.startswith(_ONE_OF):
        return []
    return [target.strip() for target in setting.removeprefix(_ONE_OF).split("|")]
