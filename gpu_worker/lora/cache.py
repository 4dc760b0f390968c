"""Caches adapters: on the host in the form in which they were read, on the device in the model's format.

The lifecycle of an adapter:

1. It is named by LoadLoraAdapter, or by a step that adds a sequence with it. The link's thread requests it (`load`,
   `prefetch`), and a reader thread reads its files while the previous step still runs.
2. The compute loop acquires it for a row (`acquire`): it is placed on the device and pinned there until the row
   releases it. The scheduler uses only as many adapters at a time as fit.
3. Unused adapters are kept until space is needed; the least recently used is evicted first, separately on host and
   device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from gpu_worker.batch.step import AdapterRef
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.arena import MAX_SLOTS
from gpu_worker.lora.peft_folder import read_adapter
from gpu_worker.lora.sizes import host_cache_bytes
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.parallel.shard_adapters import adapter_part
from midstream.config import WorkerConfig
from midstream.errors import InvalidArgumentError, NotFoundError, OverloadedError

if TYPE_CHECKING:
    from gpu_worker.models.loader import LoadedModel

P = TypeVar("P")


@dataclass(slots=True)
class _Placed(Generic[P]):
    value: P
    num_bytes: int
    num_users: int = 0


class AdapterCache(Generic[P]):
    """Adapters by fingerprint. `load`, `prefetch` and `unload` are thread-safe; all other methods must be called from
    one thread.
    """

    def __init__(
        self,
        read: Callable[[str], Adapter],
        place: Callable[[Adapter], P],
        *,
        host_bytes: int,
        device_bytes: int,
        element_bytes: int,
    ) -> None:
        self.device_bytes = device_bytes
        self._read, self._place = read, place
        self._host_bytes, self._element_bytes = host_bytes, element_bytes
        self._lock = threading.Lock()
        self._host: OrderedDict[str, Adapter] = OrderedDict()
        self._reading: dict[str, Future[Adapter]] = {}
        self._device: OrderedDict[str, _Placed[P]] = OrderedDict()
        self._unloaded: set[str] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapter-reader")

    @property
    def num_device_bytes(self) -> int:
        return sum(item.num_bytes for item in self._device.values())

    @property
    def num_host_bytes(self) -> int:
        return sum(item.host_bytes for item in self._host.values())

    def size_of(self, adapter: Adapter) -> int:
        """Return the size of the adapter in device memory, in bytes."""
        return adapter.device_bytes(self._element_bytes)

    def load(self, path: str) -> Future[Adapter]:
        """Read a folder, even if it was read before. The future raises MidstreamError if the adapter is rejected."""
        return self._reader.submit(self._fetch, path)

    def prefetch(self, ref: AdapterRef) -> None:
        """Start reading an adapter unless it is cached."""
        with self._lock:
            if ref.fingerprint not in self._host:
                self._read_soon(ref)

    def unload(self, fingerprint: str) -> None:
        """Drop an adapter from the host immediately, and from the device when the compute loop next needs the space."""
        with self._lock:
            self._host.pop(fingerprint, None)
            self._unloaded.add(fingerprint)

    def acquire(self, ref: AdapterRef) -> P:
        """Acquire a LoRA adapter on behalf of a row.

        Raises:
            InvalidArgumentError: The folder can no longer be read.
            NotFoundError: The folder now holds another adapter.
            OverloadedError: The adapters in use leave no space.
        """
        placed = self._device.get(ref.fingerprint)
        if placed is None:
            adapter = self.get(ref)
            num_bytes = self.size_of(adapter)
            self._make_room(num_bytes)
            placed = self._device[ref.fingerprint] = _Placed(self._place(adapter), num_bytes)
        self._device.move_to_end(ref.fingerprint)
        placed.num_users += 1
        return placed.value

    def add(self, adapter: Adapter) -> AdapterRef:
        """Add an adapter that was not read from a folder, and return a reference to it."""
        with self._lock:
            self._host[adapter.fingerprint] = adapter
        return AdapterRef(adapter.path, adapter.path, adapter.fingerprint)

    def hold(self, fingerprint: str) -> None:
        """Acquire an adapter that is in use by one row on behalf of another row."""
        self._device[fingerprint].num_users += 1

    def release(self, fingerprint: str) -> None:
        """Release an adapter that was acquired on behalf of a row."""
        self._device[fingerprint].num_users -= 1

    def get(self, ref: AdapterRef) -> Adapter:
        """Return an adapter on the host; read it if necessary. Raises InvalidArgumentError if the folder can no longer
        be read, or NotFoundError if the folder now holds another adapter.
        """
        with self._lock:
            if ref.fingerprint in self._host:
                self._host.move_to_end(ref.fingerprint)
                return self._host[ref.fingerprint]
            reading = self._read_soon(ref)
        adapter = reading.result()
        if adapter.fingerprint != ref.fingerprint:
            raise NotFoundError(f"{ref.path} no longer holds the adapter {ref.name!r}", field="lora.name")
        return adapter

    def close(self) -> None:
        """Stop the reader thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def drop_unloaded(self) -> None:
        """Drop unloaded adapters from the device if no row uses them."""
        with self._lock:
            unloaded = self._unloaded & self._device.keys()
        for fingerprint in unloaded:
            if not self._device[fingerprint].num_users:
                del self._device[fingerprint]
                self._unloaded.discard(fingerprint)

    def _read_soon(self, ref: AdapterRef) -> Future[Adapter]:
        reading = self._reading.get(ref.fingerprint)
        if reading is None or reading.done():
            reading = self._reading[ref.fingerprint] = self._reader.submit(self._fetch, ref.path)
            self._reading = {key: item for key, item in self._reading.items() if not item.done()}
        return reading

    def _fetch(self, path: str) -> Adapter:
        adapter = self._read(path)
        num_bytes = self.size_of(adapter)
        if num_bytes > self.device_bytes:
            raise InvalidArgumentError(
                f"{path} requires {num_bytes} bytes; the workers' adapter cache has {self.device_bytes}", field="path"
            )
        with self._lock:
            self._unloaded.discard(adapter.fingerprint)
            self._host[adapter.fingerprint] = adapter
            while self.num_host_bytes > self._host_bytes and len(self._host) > 1:
                self._host.popitem(last=False)
        return adapter

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            unloaded = self._unloaded & self._device.keys()
        # Evict unloaded adapters first, then the least recently used ones.
        for fingerprint in sorted(self._device, key=lambda item: item not in unloaded):
            is_gone = fingerprint in unloaded
            has_room = self.num_device_bytes + num_bytes <= self.device_bytes and len(self._device) < MAX_SLOTS
            if not is_gone and has_room:
                return
            if not self._device[fingerprint].num_users:
                del self._device[fingerprint]
                self._unloaded.discard(fingerprint)
        if self.num_device_bytes + num_bytes > self.device_bytes:
            raise OverloadedError("the adapters in use leave no room for another", field="lora.name")


def adapter_cache(config: WorkerConfig, model: LoadedModel, place: Callable[[Adapter], P]) -> AdapterCache[P]:
    """Return a cache of PEFT adapters for `model`. Raises ConfigError if a size is negative."""
    host_bytes = host_cache_bytes(config, model.description)

    def read(path: str) -> Adapter:
        adapter = read_adapter(
            path,
            model.description,
            max_rank=config.lora_max_adapter_size,
            max_bytes=host_bytes,
            root=config.adapter_root,
            takes_lora=model.takes_lora,
            takes_expert_lora=isinstance(model.decoder, TorchDecoder) and model.divided is None,
        )
        # Packing is done by the reader thread, so that the compute loop only starts a copy.
        if adapter.layers and model.device.type == "cuda" and isinstance(model.decoder, TorchDecoder):
            part = adapter if model.divided is None else adapter_part(adapter, model.divided)
            return replace(adapter, packed=model.decoder.packed_adapter(part).packed)
        return adapter

    return AdapterCache(
        read, place, host_bytes=host_bytes, device_bytes=model.adapter_bytes, element_bytes=model.dtype.itemsize
    )
