"""Transfer of blocks from a prefill worker to a decode worker.

The decode worker fetches blocks: a thread requests them from the worker that the scheduler named, verifies each one by
its checksum, and holds it until a step adopts it. A BlockTransport transfers the bytes: between hosts over ZeroMQ, on
one host by reading the other worker's pool in shared memory. Another transport, such as RDMA, would implement the same
protocol.

Fetching can be resumed block by block: received blocks are kept, and only the missing ones are requested again. A
worker that does not answer in time counts as having no blocks. Correct output never depends on a transfer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import zmq
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from gpu_worker.kv.block_format import Bytes, block_header, checksum
from gpu_worker.kv.device_pool import BlockPool
from gpu_worker.kv.shared_store import KvStore, PoolMemory
from protos import blocks_pb2

if TYPE_CHECKING:
    from midstream.telemetry import Metrics

logger = logging.getLogger(__name__)

# Blocks per request; limits the bytes buffered in sockets, and the bytes sent again after a lost connection.
_MAX_BLOCKS = 16
# Time to wait for an answer before a request is repeated on a new connection, and the number of attempts.
_TIMEOUT_S, _NUM_TRIES = 1.0, 2
# Time for which a worker that could not be reached is not asked again, so that it does not delay other fetches.
_PAUSE_S = 5.0
_MAX_CONNECTIONS = 16
_MAX_FRAME_BYTES = 256 << 20
_POLL_MS = 200


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The address from which a worker's blocks can be fetched.

    Attributes:
        token: Proves that the scheduler named this worker.
        public_key: Public key of its CURVE pair; empty for plain text.
        store: Name of the store that holds its pool; empty if there is none.
    """

    address: str
    token: bytes
    public_key: bytes = b""
    store: str = ""

    @classmethod
    def parse(cls, text: str, store: str) -> BlockSource:
        """Parse Register.kv_source. Raises ValueError if the text is not a source."""
        address, token, *key = text.split(" ")
        return cls(address, bytes.fromhex(token), key[0].encode() if key else b"", store)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.address, self.token.hex(), self.public_key.decode())))


class BlockServer:
    """Offers the blocks in this worker's pool to other workers."""

    def __init__(
        self, host: str, port: int, kind: bytes, pool: BlockPool, store: KvStore | None, *, curve: bool = False
    ) -> None:
        """Bind the port and serve in a thread.

        Args:
            host: Address at which other workers reach this machine.
            store: The store that holds the pool, if it is in shared memory.
            curve: Whether to encrypt, with a key pair of this process.

        Raises:
            zmq.ZMQError: The address cannot be used.
        """
        self.num_sent = self.sent_bytes = 0
        self.kind, self._pool, self._store = kind, pool, store
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        public = secret = b""
        if curve:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.source = BlockSource(address, secrets.token_bytes(16), public)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="block-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        with self._socket as socket:
            while not self._stopped.is_set():
                if not socket.poll(_POLL_MS):
                    continue
                peer, *frames = socket.recv_multipart()
                for reply in self._answer(frames):
                    with contextlib.suppress(zmq.Again):
                        socket.send_multipart([peer, reply.SerializeToString()], zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> Iterator[blocks_pb2.BlockReply]:
        try:
            request = blocks_pb2.BlockRequest.FromString(frames[0]) if len(frames) == 1 else None
        except DecodeError:
            request = None
        if request is None or not hmac.compare_digest(request.token, self.source.token):
            return
        for value in request.hashes[:_MAX_BLOCKS]:
            reply = blocks_pb2.BlockReply(hash=value)
            (places,) = np.nonzero(self._pool.hashes == np.uint64(value))
            found = self._pool.read(int(places[0]), value) if len(places) and value else None
            if found is not None and request.kind == self.kind:
                reply.is_found = True
                reply.checksum = checksum(block_header(self.kind, value, len(found)), found)
                if request.in_place and self._store is not None:
                    reply.pool, reply.block = self._store.pool_name, int(places[0])
                else:
                    reply.contents = found.tobytes()
                self.num_sent += 1
                self.sent_bytes += len(found)
            yield reply

    def count(self, metrics: Metrics) -> None:
        """Export metrics of the blocks and bytes sent."""
        for attribute, name, text in (
            ("num_sent", "worker_kv_sent_blocks", "KV blocks that other workers fetched."),
            ("sent_bytes", "worker_kv_sent_bytes", "Bytes of KV blocks that other workers fetched."),
        ):
            metrics.counter_of(name, text, {"": partial(getattr, self, attribute)})


class TransferError(Exception):
    """Blocks cannot be fetched at the moment."""


class BlockTransport(Protocol):
    """Fetches blocks from another worker."""

    def fetch(self, hashes: Sequence[int]) -> Iterator[tuple[int, Bytes | None, bytes]]:
        """Yield the hash, contents and checksum of each block, in order; contents are None if the worker does not have
        it. Raises TransferError if the remaining blocks cannot be fetched now.
        """

    def close(self) -> None:
        """Disconnect."""


class ZmqTransport:
    """Sends requests to a BlockServer; reads the blocks from shared memory if the server's pool can be opened there."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], source: BlockSource, kind: bytes, store: KvStore | None
    ):
        """Connect. Raises TransferError if the source is invalid."""
        self._source, self._kind = source, kind
        self._store = store if store is not None and store.name == source.store else None
        self._pools: dict[str, PoolMemory] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        try:
            if source.public_key:
                public, secret = zmq.curve_keypair()
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, source.public_key)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._socket.connect(source.address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransferError(f"cannot connect: {error}") from None

    def fetch(self, hashes: Sequence[int]) -> Iterator[tuple[int, Bytes | None, bytes]]:
        """Yield blocks as specified by BlockTransport."""
        request = blocks_pb2.BlockRequest(
            token=self._source.token, kind=self._kind, hashes=hashes, in_place=self._store is not None
        )
        try:
            self._socket.send(request.SerializeToString(), zmq.NOBLOCK)
            for value in hashes:
                if not self._socket.poll(int(_TIMEOUT_S * 1000)):
                    raise TransferError("no answer in time")
                reply = blocks_pb2.BlockReply.FromString(self._socket.recv())
                if reply.hash != value:
                    raise TransferError("the answer is for another block")
                yield value, self._contents(reply) if reply.is_found else None, reply.checksum
        except (zmq.ZMQError, DecodeError, OSError, ValueError) as error:
            raise TransferError(str(error)) from None

    def _contents(self, reply: blocks_pb2.BlockReply) -> Bytes:
        if self._store is None or not reply.pool:
            return np.frombuffer(reply.contents, dtype=np.uint8)
        if reply.pool not in self._pools:
            self._pools[reply.pool] = self._store.open_pool(reply.pool)
        pool = self._pools[reply.pool]
        if reply.block >= len(pool.hashes):
            raise ValueError("there is no such block")
        found = pool.read(reply.block, reply.hash)
        return np.zeros(0, dtype=np.uint8) if found is None else found  # it has changed; the caller's checksum fails

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Hashes of blocks that were fetched in an epoch, and of those that could not be fetched or are no longer held."""

    epoch: int
    hashes: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    epoch: int
    hashes: tuple[int, ...]
    kv_store: str
    kv_source: str


class BlockFetcher:
    """Fetches blocks in a thread and holds them until steps adopt them."""

    def __init__(
        self,
        kind: bytes,
        block_bytes: int,
        max_bytes: int,
        store: KvStore | None,
        connect: Callable[[BlockSource], BlockTransport] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            max_bytes: Maximum bytes of blocks to hold; above it the oldest are dropped.
            store: The store that holds this worker's pool, if any.
            connect: Creates a transport; by default a ZmqTransport.
        """
        self.num_fetched = self.fetched_bytes = self.num_missing = self.num_damaged = 0
        self.kind = self._kind_in_use = kind
        self._block_bytes = block_bytes
        self._max_blocks = max_bytes // block_bytes
        self._context = zmq.Context()
        self._connect = connect or (lambda source: ZmqTransport(self._context, source, self._kind_in_use, store))
        self._transports: OrderedDict[str, BlockTransport] = OrderedDict()
        self._paused_until: dict[str, float] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._held: OrderedDict[int, Bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._epoch = 0
        self.on_report: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="block-fetcher", daemon=True)
        self._thread.start()

    def begin_epoch(self, epoch: int) -> None:
        """Drop all held and requested blocks: in a new epoch, the scheduler does not know about them."""
        with self._lock:
            self._epoch = epoch
            self._held.clear()

    def fetch(self, epoch: int, hashes: Sequence[int], kv_store: str, kv_source: str) -> None:
        """Fetch blocks from the worker registered with this store and address; `reports` returns the outcome."""
        self._jobs.put(_Job(epoch, tuple(hashes), kv_store, kv_source))

    def reports(self) -> Iterator[Fetched]:
        """Yield the outcomes since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._reports.get_nowait()

    def take(self, hashes: NDArray[np.uint64], targets: NDArray[np.int32], pool: BlockPool) -> NDArray[np.int32]:
        """Fill blocks of the pool with held blocks, using each once; return the targets whose blocks are not held."""
        missing = []
        for value, target in zip(hashes.tolist(), targets.tolist(), strict=True):
            with self._lock:
                contents = self._held.pop(value, None)
            if contents is None:
                missing.append(target)
            else:
                pool.write(target, contents)
        return np.array(missing, dtype=np.int32)

    def close(self) -> None:
        """Stop fetching; held blocks are dropped."""
        self._jobs.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.epoch == self._epoch:
                self._reports.put(self._carry_out(job))
                self.on_report()
        for transport in self._transports.values():
            transport.close()

    def _carry_out(self, job: _Job) -> Fetched:
        left, dropped, started = list(job.hashes), set[int](), time.monotonic()
        missing: list[int] = []
        self._paused_until = {name: until for name, until in self._paused_until.items() if until > started}
        for attempt in range(_NUM_TRIES if job.kv_source not in self._paused_until else 0):
            try:
                while left:
                    self._fetch_some(job, left, missing, dropped)
                break
            except (TransferError, ValueError, OSError, zmq.ZMQError) as error:  # such as too many open files
                logger.warning("cannot fetch KV blocks: %s", error)
                self._disconnect(job.kv_source)
                if attempt == _NUM_TRIES - 1:
                    self._paused_until[job.kv_source] = time.monotonic() + _PAUSE_S
        missing += left
        self.num_missing += len(missing)
        gone = dropped | set(missing)
        found = tuple(value for value in job.hashes if value not in gone)
        logger.debug("fetched %d blocks in %.1f ms", len(found), (time.monotonic() - started) * 1000)
        return Fetched(job.epoch, found, tuple(gone))

    def _fetch_some(self, job: _Job, left: list[int], missing: list[int], dropped: set[int]) -> None:
        """Fetch the first blocks in `left`, and remove them from the list."""
        if self._kind_in_use != self.kind:
            for source in list(self._transports):
                self._disconnect(source)
            self._kind_in_use = self.kind
        transport = self._transports.get(job.kv_source)
        if transport is None:
            if len(self._transports) >= _MAX_CONNECTIONS:
                self._disconnect(next(iter(self._transports)))
            transport = self._connect(BlockSource.parse(job.kv_source, job.kv_store))
            self._transports[job.kv_source] = transport
        self._transports.move_to_end(job.kv_source)
        for value, contents, expected in transport.fetch(left[:_MAX_BLOCKS]):
            left.pop(0)
            if contents is None:
                missing.append(value)
            elif checksum(block_header(self._kind_in_use, value, self._block_bytes), contents) != expected:
                self.num_damaged += 1
                missing.append(value)
            else:
                self.num_fetched += 1
                self.fetched_bytes += len(contents)
                dropped.update(self._hold(job.epoch, value, contents))

    def _hold(self, epoch: int, value: int, contents: Bytes) -> list[int]:
        """Hold a block; return the hashes of the blocks that were dropped to make room for it."""
        dropped: list[int] = []
        with self._lock:
            if epoch != self._epoch:
                return [value]
            self._held[value] = contents
            while len(self._held) > self._max_blocks:
                dropped.append(self._held.popitem(last=False)[0])
        return dropped

    def _disconnect(self, kv_source: str) -> None:
        transport = self._transports.pop(kv_source, None)
        if transport is not None:
            transport.close()

    def count(self, metrics: Metrics) -> None:
        """Export metrics of the blocks and bytes fetched."""
        for attribute, name, text in (
            ("num_fetched", "worker_kv_fetched_blocks", "KV blocks fetched from other workers."),
            ("fetched_bytes", "worker_kv_fetched_bytes", "Bytes of KV blocks fetched from other workers."),
            ("num_missing", "worker_kv_fetch_missing", "KV blocks that could not be fetched from other workers."),
            ("num_damaged", "worker_kv_fetch_damaged", "KV blocks from other workers that failed verification."),
        ):
            metrics.counter_of(name, text, {"": partial(getattr, self, attribute)})
