"""Rendezvous of ranks, frames over shared memory and connections, and heartbeats, all in one process."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from gpu_worker.parallel.frames import FrameReceiver, FrameSender
from gpu_worker.parallel.rank_monitor import RankMonitor
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.rendezvous import DIGEST_BYTES, Connections, await_followers, connect_to_leader
from midstream.errors import ConfigError, UnavailableError

LIMIT_S = 240.0
Monitors = tuple[RankMonitor, RankMonitor, socket.socket, queue.SimpleQueue[str]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    return near, far


class Reader:
    """Reads frames in a thread as soon as `may_read` is set."""

    def __init__(self, connection: socket.socket) -> None:
        self.frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.may_read = threading.Event()
        self._connection = connection
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        receiver = FrameReceiver(self._connection)
        self.may_read.wait(LIMIT_S)
        try:
            while True:
                self.frames.put(receiver.receive())
        except ConnectionResetError:
            receiver.close()


def test_all_followers_read_all_frames_in_order() -> None:
    """Two followers share a ring of 4 KiB, which wraps around; a third follower is remote. Frames of more than 2 KiB
    are sent inline.
    """
    pairs = [socket.socketpair(), socket.socketpair(), tcp_pair()]
    readers = [Reader(far) for _, far in pairs]
    sender = FrameSender([near for near, _ in pairs], num_bytes=4096)
    for reader in readers:
        reader.may_read.set()
    rng = random.Random(1)
    sent = [rng.randbytes(length) for length in [0, 1, 2048, 2049, 10_000] + [rng.randrange(2500) for _ in range(300)]]
    for frame in sent:
        sender.send(frame)
    for reader in readers:
        assert [reader.frames.get(timeout=LIMIT_S) for _ in sent] == sent
    sender.close()
    for reader in readers:
        reader.thread.join(LIMIT_S)


def test_a_frame_is_not_overwritten_before_it_is_read() -> None:
    near, far = socket.socketpair()
    reader = Reader(far)
    sender = FrameSender([near], num_bytes=4096)
    sent = [bytes([number]) * 1500 for number in range(4)]
    sending = threading.Thread(target=lambda: list(map(sender.send, sent)))
    sending.start()
    sending.join(0.2)
    assert sending.is_alive()  # the ring has space for two frames
    reader.may_read.set()
    assert [reader.frames.get(timeout=LIMIT_S) for _ in sent] == sent
    sending.join(LIMIT_S)
    sender.close()
    reader.thread.join(LIMIT_S)


@pytest.fixture
def monitors() -> Iterator[Monitors]:
    """Return the monitors of ranks 0 and 1, rank 1's connection, and the ranks that rank 0 has lost."""
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    near, far = tcp_pair()
    one, other = RankMonitor({1: near}, 5.0, lost.put), RankMonitor({0: far}, 5.0, lambda reason: None)
    yield one, other, far, lost
    other.leave()
    one.close()
    far.close()


def test_the_end_of_a_rank_is_detected(monitors: Monitors) -> None:
    _, _, far, lost = monitors
    far.shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=LIMIT_S) == "rank 1 disconnected"


def test_an_expected_exit_is_not_a_loss(monitors: Monitors) -> None:
    one, other, _, lost = monitors
    one.expect_end()
    other.leave()
    one.close()
    assert lost.empty()


def test_a_rank_can_request_the_end(
    monitors: Monitors,
) -> None:
    one, other, _, lost = monitors
    asked = threading.Event()
    other.ask_drain()
    one.on_drain(asked.set)
    assert asked.wait(LIMIT_S)
    assert lost.empty()


def test_a_process_without_progress_is_lost(monitors: Monitors) -> None:
    one, _, _, lost = monitors
    one.watch(lambda: True)
    assert lost.get(timeout=LIMIT_S) == "a step is stuck"


def test_a_silent_rank_is_lost() -> None:
    near, far = tcp_pair()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    monitor = RankMonitor({3: near}, 0.2, lost.put)
    assert lost.get(timeout=LIMIT_S) == "rank 3 sent no heartbeat for 0.2 s"
    far.close()
    monitor.close()


RANKS = [Ranks(rank, 3, tensor_size=3, master_addr="127.0.0.1") for rank in range(3)]
DIGEST = b"d" * DIGEST_BYTES


def dial(store: HashStore, rank: int, digest: bytes, connections: list[Connections]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):  # rank 0 has disconnected again
            connections.append(connect_to_leader(store, RANKS[rank], digest))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_followers_are_met_by_rank_and_share_memory_on_one_host() -> None:
    store, followers = HashStore(), list[Connections]()
    dialling = [dial(store, rank, DIGEST, followers) for rank in (2, 1)]
    leader = await_followers(store, RANKS[0], DIGEST, LIMIT_S)
    assert {*leader.heartbeats} == {*leader.frames} == {1, 2}
    assert {connection.family for connection in leader.frames.values()} == {socket.AF_UNIX}
    for thread in dialling:
        thread.join(LIMIT_S)
    for connections in (leader, *followers):
        connections.close()


def test_a_rank_with_other_settings_is_refused() -> None:
    store, followers = HashStore(), list[Connections]()
    dialling = dial(store, 1, b"e" * DIGEST_BYTES, followers)
    with pytest.raises(ConfigError, match="rank 1 has another model or other settings than rank 0"):
        await_followers(store, RANKS[0], DIGEST, LIMIT_S)
    dialling.join(LIMIT_S)
    for connections in followers:
        connections.close()


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(UnavailableError, match=r"ranks \[1, 2\] did not connect within 0.1 s"):
        await_followers(HashStore(), RANKS[0], DIGEST, 0.1)
