"""Connects the ranks: each follower opens two connections to rank 0, one for frames and one for heartbeats.

Rank 0 listens, and publishes its port and a secret in the group's store. Followers connect and send the secret, their
rank, and a digest of the settings that must match. Frames use rank 0's Unix socket if it is reachable: it is in the
abstract namespace, which belongs to a network namespace, so peers that reach it are on the same host. All other
connections use TCP.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

from gpu_worker.parallel.frames import read_exactly
from gpu_worker.parallel.ranks import Ranks
from midstream.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sIB{DIGEST_BYTES}s")  # secret, rank, purpose, digest
_HEARTBEATS, _FRAMES = 0, 1
_KEY = "rank0"
_HELLO_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Connections:
    """Connections to other ranks, by rank."""

    heartbeats: dict[int, socket.socket] = field(default_factory=dict)
    frames: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        for connection in (*self.heartbeats.values(), *self.frames.values()):
            connection.close()


def await_followers(store: Store, ranks: Ranks, digest: bytes, timeout_s: float) -> Connections:
    """Accept the connections of all followers. To be called on rank 0. Raises ConfigError if a follower has another
    model or other settings, or UnavailableError if a follower did not connect in time.
    """
    secret, connections = secrets.token_bytes(_SECRET_BYTES), Connections()
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack, ExitStack() as failing:
        failing.callback(connections.close)
        selector = stack.enter_context(selectors.DefaultSelector())
        remote = stack.enter_context(_listen(ranks.master_addr))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(_local_name(secret))
        local.listen()
        for listener in (remote, local):
            selector.register(listener, selectors.EVENT_READ)
        store.set(_KEY, f"{remote.getsockname()[1]} {secret.hex()}")
        wanted = ranks.world_size - 1
        while len(connections.heartbeats) < wanted or len(connections.frames) < wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = sorted({*range(1, ranks.world_size)} - {*connections.heartbeats})
                raise UnavailableError(f"ranks {missing} did not connect within {timeout_s:g} s")
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                _welcome(key.fileobj.accept()[0], secret, digest, connections)
        failing.pop_all()
    return connections


def connect_to_leader(store: Store, ranks: Ranks, digest: bytes) -> Connections:
    """Connect to rank 0. To be called on a follower. Raises OSError if rank 0 cannot be reached."""
    port, secret = store.get(_KEY).decode().split()
    token = bytes.fromhex(secret)
    address = (ranks.master_addr, int(port))
    connections = Connections()
    try:
        connections.heartbeats[0] = heartbeats = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
        heartbeats.sendall(_HELLO.pack(token, ranks.rank, _HEARTBEATS, digest))
        connections.frames[0] = frames = _dial_frames(address, token)
        frames.sendall(_HELLO.pack(token, ranks.rank, _FRAMES, digest))
    except BaseException:
        connections.close()
        raise
    frames.settimeout(None)
    way = "shared memory" if frames.family == socket.AF_UNIX else "TCP"
    logger.info("receiving steps over %s", way, extra={"transport": way})
    return connections


def _dial_frames(address: tuple[str, int], secret: bytes) -> socket.socket:
    frames = socket.socket(socket.AF_UNIX)
    try:
        frames.connect(_local_name(secret))
    except OSError:
        frames.close()
        frames = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
        frames.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return frames


def _welcome(connection: socket.socket, secret: bytes, digest: bytes, connections: Connections) -> None:
    connection.settimeout(_HELLO_TIMEOUT_S)
    try:
        token, rank, purpose, theirs = _HELLO.unpack(read_exactly(connection, _HELLO.size))
    except OSError:
        connection.close()
        return
    if not secrets.compare_digest(token, secret):
        logger.warning("rejected a connection to the group: wrong secret")
        connection.close()
        return
    if theirs != digest:
        connection.close()
        raise ConfigError(f"rank {rank} has another model or other settings than rank 0", field="model")
    connection.settimeout(None)
    if purpose == _FRAMES and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The connection of a follower that restarted in the meantime replaces its earlier one.
    known = connections.frames if purpose == _FRAMES else connections.heartbeats
    if rank in known:
        known[rank].close()
    known[rank] = connection


def _listen(address: str) -> socket.socket:
    """Listen on the address of rank 0, or on all addresses if this host does not have that address."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(target[0]), 0), family=family)
    except OSError:
        return socket.create_server(("", 0))


def _local_name(secret: bytes) -> str:
    return f"\0midstream-ranks-{secret.hex()}"
