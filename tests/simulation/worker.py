"""The process of a simulated worker: the real connection and wire format with a simulated model, and one task instead
of two threads.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
from numpy.typing import NDArray

from gpu_worker.batch.step import RowLogProbs, Step, StepOutput
from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.kv.tiers import StoreChanges
from gpu_worker.kv.transfer import Fetched
from gpu_worker.scheduler_link.link import EpochStarted, SchedulerLink, Stopped, WaitingStep, Work
from gpu_worker.scheduler_link.link import Pool as LinkPool
from gpu_worker.sleep import SleepOrdered, registration_asleep
from gpu_worker.weight_updates import WeightsReady
from midstream.errors import ExecutionError
from midstream.telemetry import Metrics
from protos import kind_pb2, worker_pb2
from tests.simulation.loop import Flag, Process
from tests.simulation.model import POISON_ID, TOKENS_PER_BLOCK, VOCAB_SIZE, SimulatedModel, fingerprint
from tests.simulation.network import Network, running
from tests.simulation.zmq_transport import Dealer, Poller

# A pool in the shared memory of a host: its process, hashes and slots.
Pool = tuple[Process, NDArray[np.uint64], list[list[int]]]
Store = list[Pool]
# The newest pool of each worker, by its `kv_source`.
Pools = dict[str, Pool]
_BLOCK_BYTES = 8 << 20  # so that a step adopts four blocks
_MAX_STORED = 60


@dataclass
class Host:
    """Data that workers leave for others.

    Attributes:
        store: The host's memory; None if each worker's pool ends with its process.
        others: The store and the tier of each other kind of workers.
        tier: Slots of stored blocks by hash, the most recently used ones last; None if there are no tiers.
        pools: Sources of fetched blocks.
        leaving: Processes that have left their blocks to others, and have not ended.
        happened: How often each event occurred.
    """

    store: Store | None = None
    tier: dict[int, list[int]] | None = None
    pools: Pools = field(default_factory=dict)
    leaving: list[Process] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    others: dict[int, Host] = field(default_factory=dict)

    def of_kind(self, kind: int) -> Host:
        """Return the data for workers of a kind, which never use that of another kind."""
        if not kind:
            return self
        if kind not in self.others:
            host = self.others[kind] = Host(pools=self.pools, happened=self.happened)
            host.store = None if self.store is None else []
            host.tier = None if self.tier is None else {}
        return self.others[kind]


class Tiers:
    """The tier of a host as seen by one worker: blocks are stored with a delay, and the worker's information may be out
    of date.
    """

    def __init__(self, network: Network, stored: dict[int, list[int]], pool: Pool, step_s: float) -> None:
        self._network, self._stored, self._step_s = network, stored, step_s
        _, self._hashes, self._slots = pool
        self._known: set[int] = set()

    def receive(self, _: worker_pb2.StepBatch) -> None:
        pass

    def offer(self, blocks: Iterable[tuple[int, int]]) -> None:
        asyncio.create_task(self._store(list(blocks)), name="store")  # noqa: RUF006 (its process holds it)

    async def _store(self, blocks: list[tuple[int, int]]) -> None:
        for block, value in blocks:
            await asyncio.sleep(self._step_s * self._network.dice.uniform(0, 3))
            if self._hashes[block] != np.uint64(value):
                continue
            self._stored[value] = list(self._slots[block])
            if len(self._stored) > _MAX_STORED:
                del self._stored[next(iter(self._stored))]

    def hashes(self) -> set[int]:
        self._known = set(self._stored)
        return self._known

    def changes(self) -> StoreChanges:
        before = self._known
        now = self.hashes()
        return StoreChanges(tuple(sorted(now - before)), tuple(sorted(before - now)))

    def get(self, value: int) -> list[int] | None:
        """Return the slots of a block, or None. One block in twenty is damaged; the damage is detected, and the block
        is removed.
        """
        if self._network.dice.random() < 0.05:
            self._stored.pop(value, None)
        found = self._stored.pop(value, None)
        if found is None:
            return None
        self._stored[value] = found
        return list(found)


class Fetcher:
    """Fetches blocks of other workers one after another; some fetches never complete.

    Attributes:
        held: Slots of blocks that no step has adopted, by hash.
    """

    def __init__(self, network: Network, pools: Pools, step_s: float) -> None:
        self.held: dict[int, list[int]] = {}
        self.on_report: Callable[[], None] = lambda: None
        self._network, self._pools, self._step_s = network, pools, step_s
        self._epoch = 0
        self._reports: list[Fetched] = []

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self.held.clear()

    def fetch(self, epoch: int, hashes: list[int], _: str, kv_source: str) -> None:
        asyncio.create_task(self._fetch(epoch, hashes, kv_source), name="fetch")  # noqa: RUF006 (its process holds it)

    def reports(self) -> list[Fetched]:
        reports, self._reports = self._reports, []
        return reports

    async def _fetch(self, epoch: int, hashes: list[int], kv_source: str) -> None:
        dice, missing = self._network.dice, list[int]()
        self._network.note(f"{running()!r} fetches {len(hashes)} blocks {kv_source}")
        if dice.random() < 0.05:
            return
        for value in hashes:
            await asyncio.sleep(self._step_s * dice.uniform(0, 0.5))
            process, stored, slots = self._pools[kv_source]
            (places,) = np.nonzero(stored == np.uint64(value))
            if process.is_dead or process.held is not None or not len(places) or dice.random() < 0.02:
                missing.append(value)
            elif epoch == self._epoch:
                self.held[value] = list(slots[places[0]])
        found = tuple(value for value in hashes if value not in missing)
        self._reports.append(Fetched(epoch, found, tuple(missing)))
        self.on_report()


class SimulatedLink(SchedulerLink):
    """The connection to the scheduler, with a task instead of a thread."""

    def __init__(
        self,
        network: Network,
        address: str,
        register: worker_pb2.Register,
        kept: KeptBlocks,
        fetcher: Fetcher,
        tiers: Tiers | None,
    ) -> None:
        super().__init__(
            address,
            register,
            Metrics(),
            worker_pb2.MemoryUsage,
            kept=kept,
            fetcher=fetcher,  # type: ignore[arg-type]
            tiers=tiers,  # type: ignore[arg-type]
            **_unused(),
        )
        self.has_work = Flag()
        self._network = network
        self._changed = Flag()

    def start(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()
        self._wake_reader = _NoSocket()  # type: ignore[assignment]
        asyncio.create_task(self._run_task(), name="link")  # noqa: RUF006 (its process holds it)

    async def _run_task(self) -> None:
        dealer = Dealer(self._network, self._address, self._changed.set)
        self._dealer = dealer  # type: ignore[assignment]
        while self._turn(dealer, dealer.monitor, Poller(dealer.monitor)):  # type: ignore[arg-type]
            self.has_work.set()
            await self._changed.wait(max(self._wait_s(), 0.001))
        self.has_work.set()

    def _wake(self) -> None:
        self._changed.set()


@functools.cache
def _unused() -> dict[str, Any]:
    """Return stand-ins for the arguments that the simulation does not use."""
    given = ("self", "address", "register", "metrics", "memory", "kept")
    parameters = inspect.signature(SchedulerLink.__init__).parameters.values()
    return {item.name: Mock() for item in parameters if item.name not in given and item.default is item.empty}


class _NoSocket:
    def fileno(self) -> int:
        return -2

    def recv(self, _: int) -> bytes:
        raise BlockingIOError


class SimulatedWorker:
    """The worker's compute loop.

    Attributes:
        hangs: Whether the next step hangs while the connection stays alive.
        lies: Number of upcoming results that are wrong; -1 means all.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        address: str,
        num_blocks: int,
        step_s: float,
        host: Host,
        role: str,
        kind: int = 0,
        *,
        has_stages: bool = True,
    ) -> None:
        self.process = running()
        self.hangs, self.lies = False, 0
        self._network, self._step_s, self._whole_host = network, step_s, host
        incarnation = network.dice.getrandbits(63)
        # Some workers have larger blocks than the scheduler; workers that hand blocks over must have the same block
        # size.
        factor = 1 + incarnation // 2 % 2 if role == "both" else 1
        tokens_per_block = factor * TOKENS_PER_BLOCK
        num_blocks = -(-3 * num_blocks // 4) if factor > 1 else num_blocks  # more space is wasted in large blocks
        self._register = worker_pb2.Register(
            group_id=name,
            incarnation=incarnation,
            kind=kind_pb2.WorkerKind(model_fingerprint=fingerprint(), arithmetic=str(kind)),
            tokens_per_block=tokens_per_block,
            num_blocks=num_blocks,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=1024,
            max_batch_size=16,
            max_num_tokens=256,
            world_size=1,
            device="simulated",
            features=("log_probs", "min_tokens", "sleep"),
            protocol_version=1,
            block_bytes=_BLOCK_BYTES,
            role=role,
            kv_source=f"at {name}" if role == "prefill" else "",
            num_micro_batches=1 + incarnation % 2 if has_stages else 1,
        )
        # The update whose weights were loaded last or are being loaded, and the one whose weights are ready; 0 if none.
        self._loading = self._loaded = 0
        kept = self._take_weights(kind)
        self.link = SimulatedLink(network, address, self._register, kept, self._fetcher, self._tiers)
        self.link.on_weights = self._handle_weights
        self.link.leave_blocks = self._leave_blocks

    def _take_weights(self, kind: int) -> KeptBlocks:
        """Start with an empty pool for a model of this kind."""
        host, register, self._number = self._whole_host.of_kind(kind), self._register, kind
        register.block_kind = str(kind)
        register.kv_store = "" if host.store is None else f"host {kind}"
        register.tier_store = "" if host.tier is None else f"tiers {kind}"
        del register.kept_blocks[:], register.kept_hashes[:]
        hashes = np.zeros(register.num_blocks, dtype=np.uint64)
        self._host = host
        self.model = SimulatedModel(register.num_blocks, register.tokens_per_block, kind)
        pool = (self.process, hashes, self.model.slots)
        self._fetcher = Fetcher(self._network, host.pools, self._step_s)
        self._tiers = None if host.tier is None else Tiers(self._network, host.tier, pool, self._step_s)
        host.pools[f"at {register.group_id}"] = pool
        self._store = [] if host.store is None else host.store
        self._store.append(pool)
        return KeptBlocks(hashes, None if self._tiers is None else self._tiers.offer)

    def _leave_blocks(self) -> bool:
        self._host.leaving.append(self.process)
        return self._host.store is not None

    def _handle_weights(self, message: worker_pb2.SchedulerMessage, epoch: int) -> None:
        """Load the weights that a path such as /weights/3 names, as WeightUpdates does."""
        if message.HasField("prepare_weights") and message.prepare_weights.epoch == epoch:
            self._loading, self._loaded = message.prepare_weights.update, 0
            asyncio.create_task(self._prepare(message.prepare_weights), name="prepare")  # noqa: RUF006 (its process holds it)
        elif message.HasField("switch_weights") and message.switch_weights.epoch == epoch:
            switch = message.switch_weights
            if switch.update == self._loaded:
                self._begin_switch(switch)
            elif switch.update != self._loading:
                self._loading, self._loaded = switch.update, 0
                asyncio.create_task(self._switch(switch), name="switch")  # noqa: RUF006 (its process holds it)

    async def _prepare(self, prepare: worker_pb2.PrepareWeights) -> None:
        await asyncio.sleep(self._network.dice.uniform(0, 0.3))
        if self._loading == prepare.update:
            self._loaded = prepare.update
        number = int(prepare.path.rpartition("/")[2])
        found = worker_pb2.WeightsPrepared(
            epoch=prepare.epoch,
            update=prepare.update,
            model_fingerprint=f"weights {number}",
            weights_root=f"root {number}",
        )
        self.link.answer_weights(found)

    async def _switch(self, switch: worker_pb2.SwitchWeights) -> None:
        await asyncio.sleep(self._network.dice.uniform(0, 0.3))
        if self._loading == switch.update:
            self._begin_switch(switch)

    def _begin_switch(self, switch: worker_pb2.SwitchWeights) -> None:
        self._loading = self._loaded = 0
        self.link.interrupt(WeightsReady(switch, switch.weights_version))  # type: ignore[arg-type]
        self.link.has_work.set()

    async def _change_weights(self, switch: worker_pb2.SwitchWeights) -> None:
        self._network.note(f"{self.process!r} changes its weights to {switch.path}")
        self.link.suspend("its weights are replaced")
        self._host.happened["changed weights"] += 1
        await asyncio.sleep(self._network.dice.uniform(0, 0.1))
        number = int(switch.path.rpartition("/")[2])
        kept = self._take_weights(number)
        self._register.sleep_level = 0
        kind = self._register.kind
        kind.model_fingerprint, kind.weights_root = f"weights {number}", switch.weights_root
        kind.weights_version = switch.weights_version
        pool = LinkPool(Mock(answers=()), kept, self._tiers, self._fetcher)  # type: ignore[arg-type]
        self.link.resume(self._register, pool)

    async def _set_sleep(self, level: int) -> None:
        self._network.note(f"{self.process!r} gets the sleep level {level}")
        if not level and not self._register.sleep_level:
            self.link.resume_unchanged()
            return
        self.link.suspend("it sleeps or wakes up")
        self._host.happened["slept" if level else "woke up"] += 1
        await asyncio.sleep(self._network.dice.uniform(0, 0.1 if level else 0.5))
        kept = self._take_weights(self._number)
        self._register.sleep_level = level
        if level:
            self.link.resume(registration_asleep(self._register, level))
            return
        pool = LinkPool(Mock(answers=()), kept, self._tiers, self._fetcher)  # type: ignore[arg-type]
        self.link.resume(self._register, pool)

    async def run(self) -> int:
        """Serve until SIGTERM or a rejection; return the exit code."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.link.leave)
        self.link.start()
        while True:
            work = self._next()
            if work is None:
                await self.link.has_work.wait()
            elif isinstance(work, WaitingStep):
                await self._execute(work)
            elif isinstance(work, EpochStarted):
                self.model.clear()
            elif isinstance(work, WeightsReady):
                await self._change_weights(work.weights)  # type: ignore[arg-type]
            elif isinstance(work, SleepOrdered):
                await self._set_sleep(work.level)
            else:
                assert isinstance(work, Stopped)
                # The wait stands in for the socket's linger time, in which it sends its remaining messages.
                await asyncio.sleep(0.05)
                return work.exit_code

    def _next(self) -> Work | None:
        try:
            return self.link.inbox.get_nowait()
        except queue.Empty:
            return None

    async def _execute(self, work: WaitingStep) -> None:
        step = work.step
        if step.epoch != self.link.epoch:
            return
        if any(POISON_ID in new.token_ids for new in step.new_sequences):
            self._network.note(f"{self.process!r} crashes because of a poison request")
            self.process.die()
        while self.hangs:  # noqa: ASYNC110 (for good)
            await asyncio.sleep(1)
        await asyncio.sleep(self._step_s * self._network.dice.uniform(0.5, 1.5))
        missing = self._adopt(step)
        output = replace(self.model.run(step), missing_blocks=missing)
        if self.lies:
            self.lies -= self.lies > 0
            output = self._lie(output)
        self.link.send_result(step, output, 0.0)

    def _lie(self, output: StepOutput) -> StepOutput:
        dice, count = self._network.dice, len(output.token_ids)
        self._network.note(f"{self.process!r} lies")
        lies: tuple[dict[str, Any], ...] = (
            {"token_ids": np.append(output.token_ids, 1)},
            {"token_ids": np.full(count + 1, VOCAB_SIZE)},
            {"token_ids": output.token_ids, "num_tokens": (1,) * (count + 1)},
            {"num_drafts": (0,) * (count + 2)},
            {"num_drafts": (9,) * max(count, 1)},
            {"candidate_log_probs": (-1.0,)},
            {"missing_blocks": (1_000_000,)},
            {"errors": ((1_000_000, ExecutionError("no such row")),)},
            {"log_probs": (RowLogProbs(1_000_000, -1.0, 0, (), ()),)},
        )
        return replace(output, **dice.choice(lies))

    def _adopt(self, step: Step) -> tuple[int, ...]:
        """Fill blocks with fetched data, the data of dead workers, or data from tiers; return the blocks that were not
        found.
        """
        missing = []
        for block, value in zip(step.adopted_blocks.tolist(), step.adopted_hashes, strict=True):
            place, slots = self._find(value)
            if slots is None:
                missing.append(block)
            else:
                self.model.slots[block] = slots
                self._host.happened[f"adopted {place}"] += 1
                self._network.note(f"{self.process!r} adopts block {block}, {place}")
        return tuple(missing)

    def _find(self, value: int) -> tuple[str, list[int] | None]:
        if value in self._fetcher.held:
            return "fetched", self._fetcher.held.pop(value)
        for process, hashes, slots in self._store:
            (places,) = np.nonzero(hashes == value)
            if process.is_dead and len(places):
                return "left", list(slots[places[0]])
            if process in self._host.leaving and len(places):
                return "left by a live process", list(slots[places[0]])
        return "stored", None if self._tiers is None else self._tiers.get(value)
