"""Connects to the scheduler's ZeroMQ socket, and detects lost or rejected connections."""

from __future__ import annotations

import contextlib
import logging
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from midstream.security.curve import WorkerCredentials

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 20
_REDIAL_S = 1.0
_RECONNECT_MS, _MAX_RECONNECT_MS = 20, 200
_LINGER_MS = 1000
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
LINK_EVENTS = zmq.EVENT_DISCONNECTED | _REFUSED


class Dialler:
    """Manages the connection to one scheduler."""

    def __init__(self, address: str, credentials: WorkerCredentials | None) -> None:
        """Prepare the connection; `credentials` are its keys, None for plain text."""
        self._address = address
        self._credentials = credentials
        self._was_refused = False
        self._redial_at = 0.0

    def dial(self, dealer: zmq.Socket[bytes]) -> None:
        """Configure and connect a DEALER socket; from then on ZeroMQ reconnects it."""
        dealer.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while disconnected
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.LINGER, _LINGER_MS)
        if self._credentials is not None:
            self._credentials.secure(dealer)
        dealer.connect(self._address)

    def was_cut(self, monitor: zmq.Socket[bytes]) -> bool:
        """Return whether the connection has been lost since the last call; `monitor` must report LINK_EVENTS."""
        was_cut = False
        while True:
            try:
                message = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event = parse_monitor_message(message)["event"]
            was_cut = was_cut or event == zmq.EVENT_DISCONNECTED
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._redial_at = time.monotonic() + _REDIAL_S
            if event != zmq.EVENT_DISCONNECTED and not self._was_refused:
                self._was_refused = True
                logger.warning(
                    "handshake failed: the scheduler rejects this worker's key, or has a different key itself"
                )
        return was_cut

    def redial_when_due(self, dealer: zmq.Socket[bytes]) -> None:
        """Reconnect after a rejection, which ZeroMQ treats as final although the key may be allowed in the meantime."""
        if self._redial_at and time.monotonic() >= self._redial_at:
            self._redial_at = 0.0
            with contextlib.suppress(zmq.ZMQError):
                dealer.disconnect(self._address)
            dealer.connect(self._address)

    def note_registered(self) -> None:
        """Record a successful registration, so that the next rejection is logged again."""
        self._was_refused = False
