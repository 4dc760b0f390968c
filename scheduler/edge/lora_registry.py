"""The registry of adapters that requests can name: stored in the journal and sent to every worker.

`load` asks every worker to read and check the folder; when all agree on its contents, the adapter is stored in the
journal and can be named. Workers that join later receive all adapters. An accepted request carries what its adapter's
name resolved to (`resolve`), so it continues with the same weights on any worker, whatever is loaded or unloaded in the
meantime: workers read missing adapters again.

The core knows only which adapter a request uses, and how much memory the adapter takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from midstream.errors import (
    AlreadyExistsError,
    DeadlineError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_proto,
)
from protos import generation_pb2, worker_pb2
from scheduler.core.worker_group import WorkerGroup
from scheduler.journal import AdapterLoaded, AdapterUnloaded, Journal, LoadedAdapter

logger = logging.getLogger(__name__)

MAX_NAME = 128
_LOOK_INTERVAL_S = 0.25
# Loading a large adapter from a slow disk takes minutes at most.
_ANSWER_TIMEOUT_S = 300.0
# A worker with any of these features reads adapters, and rejects kinds that it does not support.
_FEATURES = frozenset(("lora", "prompt_tuning"))


class AdapterSender(Protocol):
    """Sends adapter commands to workers."""

    def send_load_adapter(self, connection: bytes, epoch: int, name: str, path: str) -> None:
        """Ask a worker to load an adapter; it answers with a LoraResult."""

    def send_unload_adapter(self, connection: bytes, epoch: int, fingerprint: str) -> None:
        """Ask a worker to unload an adapter."""


@dataclass(frozen=True, slots=True)
class _Loading:
    path: str
    task: asyncio.Task[LoadedAdapter]


class Adapters:
    """All adapters of one scheduler."""

    def __init__(
        self,
        known: Iterable[LoadedAdapter],
        *,
        groups: Callable[[], list[WorkerGroup]],
        sender: AdapterSender,
        journal: Journal,
        vocab_size: int,
    ) -> None:
        """Start with the adapters from the journal.

        Args:
            vocab_size: Vocabulary size of the model; virtual tokens have the ids that follow.
        """
        self._known = {adapter.name: adapter for adapter in known}
        self._groups, self._sender, self._journal = groups, sender, journal
        self._vocab_size = vocab_size
        self._loading: dict[str, _Loading] = {}
        self._answers: dict[tuple[str, int], asyncio.Future[worker_pb2.LoraResult]] = {}

    def loaded(self) -> list[LoadedAdapter]:
        """Return the loaded adapters, sorted by name."""
        return sorted(self._known.values(), key=lambda adapter: adapter.name)

    async def load(self, name: str, path: str, *, field: str = "") -> LoadedAdapter:
        """Load an adapter on every worker, unless it is loaded already.

        Args:
            field: Prefix of the field names in errors.

        Raises:
            MidstreamError: The name is taken by another path, no worker is connected, or the adapter does not fit.
        """
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidArgumentError(f"has {len(name)} characters; must have 1 to {MAX_NAME}", field=f"{field}name")
        if not PurePath(path).is_absolute() or "\0" in path:
            raise InvalidArgumentError("must be an absolute path", field=f"{field}path")
        known, loading = self._known.get(name), self._loading.get(name)
        taken = known.path if known is not None else loading.path if loading is not None else path
        if taken != path:
            raise AlreadyExistsError(f"{name!r} is loaded from {taken}; unload it first", field=f"{field}name")
        if known is not None:
            return known
        if loading is None:
            task = asyncio.create_task(self._load(name, path))
            loading = self._loading[name] = _Loading(path, task)
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        try:
            return await asyncio.shield(loading.task)
        except MidstreamError as error:
            raise type(error)(error.message, field=f"{field}{error.field}" if error.field else "") from None

    async def unload(self, name: str) -> None:
        """Prevent new requests from naming an adapter. Raises NotFoundError if the adapter is not loaded."""
        adapter = self._known.pop(name, None)
        if adapter is None:
            raise NotFoundError(f"no adapter {name!r} is loaded", field="name")
        await self._keep(AdapterUnloaded(name))
        if all(other.fingerprint != adapter.fingerprint for other in self._known.values()):
            for group in self._groups():
                self._sender.send_unload_adapter(group.connection, group.epoch, adapter.fingerprint)

    async def resolve(self, request: generation_pb2.GenerateRequest) -> None:
        """Replace the adapter names in a request by references to the adapters. Raises MidstreamError if an adapter is
        unknown, of the wrong kind, or cannot be loaded from the given path.
        """
        if request.HasField("lora"):
            adapter = await self._find(request.lora.name, request.lora.path, "lora.")
            if adapter.num_virtual_tokens:
                raise InvalidArgumentError(f"{adapter.name!r} is a prompt adapter", field="lora.name")
            request.lora.resolved.CopyFrom(self._resolved(adapter))
        if request.prompt_tuning.WhichOneof("source") == "name":
            tuning = request.prompt_tuning
            adapter = await self._find(tuning.name, tuning.path, "prompt_tuning.")
            if not adapter.num_virtual_tokens:
                raise InvalidArgumentError(f"{adapter.name!r} is not a prompt adapter", field="prompt_tuning.name")
            tuning.resolved.CopyFrom(self._resolved(adapter))

    def on_joined(self, connection: bytes, epoch: int) -> None:
        """Send all loaded adapters to a new worker, so that it reads them before they are needed."""
        for adapter in self._known.values():
            self._sender.send_load_adapter(connection, epoch, adapter.name, adapter.path)

    def on_result(self, result: worker_pb2.LoraResult) -> None:
        """Process a worker's answer."""
        waiting = self._answers.pop((result.name, result.epoch), None)
        if waiting is not None:
            waiting.set_result(result)
            return
        known = self._known.get(result.name)
        if result.HasField("error"):
            logger.error("a worker cannot load the adapter %s: %s", result.name, result.error.message)
        elif known is not None and known.fingerprint != result.fingerprint:
            logger.error("the files of adapter %s in %s differ on a worker", result.name, known.path)

    async def _find(self, name: str, path: str, field: str) -> LoadedAdapter:
        if path:
            return await self.load(name, path, field=field)
        adapter = self._known.get(name)
        if adapter is None:
            raise NotFoundError(f"no adapter {name!r} is loaded", field=f"{field}name")
        return adapter

    def _resolved(self, adapter: LoadedAdapter) -> generation_pb2.ResolvedAdapter:
        return generation_pb2.ResolvedAdapter(
            path=adapter.path,
            fingerprint=adapter.fingerprint,
            num_bytes=adapter.num_bytes,
            num_virtual_tokens=adapter.num_virtual_tokens,
            first_virtual_token=self._vocab_size if adapter.num_virtual_tokens else 0,
        )

    async def _load(self, name: str, path: str) -> LoadedAdapter:
        groups = self._groups()
        if not groups:
            raise UnavailableError("no worker has joined")
        if not all(_FEATURES.intersection(group.registration.features) for group in groups):
            raise UnsupportedError("the workers do not support adapters", field="path")
        answers = await asyncio.gather(*(self._ask(group, name, path) for group in groups))
        results = [answer for answer in answers if answer is not None]
        if not results:
            raise UnavailableError("all workers disconnected before they answered")
        try:
            adapter = _agreed(name, path, results)
        except MidstreamError:
            for result in results:
                self._forget(result, groups)
            raise
        await self._keep(AdapterLoaded(adapter))
        self._known[name] = adapter
        asked = {group.epoch for group in groups}
        for group in self._groups():
            if group.epoch not in asked:  # workers that joined in the meantime
                self._sender.send_load_adapter(group.connection, group.epoch, name, path)
        logger.info("loaded the adapter %s", name, extra={"path": path, "fingerprint": adapter.fingerprint})
        return adapter

    async def _ask(self, group: WorkerGroup, name: str, path: str) -> worker_pb2.LoraResult | None:
        """Return a worker's answer, an error if there is none in time, or None if the worker disconnects first."""
        key, give_up_at = (name, group.epoch), time.monotonic() + _ANSWER_TIMEOUT_S
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._sender.send_load_adapter(group.connection, group.epoch, name, path)
        while not answer.done():
            await asyncio.wait((answer,), timeout=_LOOK_INTERVAL_S)
            if all(other.epoch != group.epoch for other in self._groups()):
                self._answers.pop(key, None)
                break
            if not answer.done() and time.monotonic() >= give_up_at:
                del self._answers[key]
                late = DeadlineError(f"a worker did not load the adapter within {_ANSWER_TIMEOUT_S:g} s; try again")
                return worker_pb2.LoraResult(name=name, epoch=group.epoch, error=late.to_proto())
        return answer.result() if answer.done() else None

    def _forget(self, result: worker_pb2.LoraResult, groups: Sequence[WorkerGroup]) -> None:
        for group in groups:
            if group.epoch == result.epoch and result.fingerprint:
                self._sender.send_unload_adapter(group.connection, group.epoch, result.fingerprint)

    async def _keep(self, entry: AdapterLoaded | AdapterUnloaded) -> None:
        kept = asyncio.Event()
        self._journal.commit([entry], kept.set)
        await kept.wait()


def _agreed(name: str, path: str, results: list[worker_pb2.LoraResult]) -> LoadedAdapter:
    for result in results:
        if result.HasField("error"):
            raise from_proto(result.error)
    first = results[0]
    if any(result.fingerprint != first.fingerprint for result in results):
        raise InvalidArgumentError(f"the files in {path} differ between workers", field="path")
    return LoadedAdapter(
        name=name,
        path=path,
        fingerprint=first.fingerprint,
        num_bytes=max(result.num_bytes for result in results),
        rank=first.rank,
        num_virtual_tokens=first.num_virtual_tokens,
    )
