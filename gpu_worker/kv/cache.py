"""The pool of KV blocks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.step import IntArray
from gpu_worker.kv.device_pool import BlockPool, DevicePool
from gpu_worker.kv.shared_store import KvStore, PoolMemory
from gpu_worker.kv.tiers import KvTiers
from gpu_worker.models.description import DecoderDescription
from kernels import KvScales
from kernels.cpu import stored_head_dim
from midstream.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.kv.transfer import BlockFetcher, BlockServer

logger = logging.getLogger(__name__)

OpenTiers = Callable[[BlockPool], KvTiers]
_CPU_SHARE = 0.25
_CPU_MAX_BYTES = 4 << 30


class KvCache:
    """Keys and values of all layers, stored in blocks.

    Attributes:
        keys, values: Each [num_layers, num_blocks, tokens_per_block, num_kv_heads, head_dim]; a decoder may order the
            elements inside a block differently. With an integer type on a CPU, head_dim includes the scales. Latent
            attention stores no separate values: their head_dim is 0. Layers without attention have none.
        key_scales, value_scales: Scales of a quantized cache that stores them separately, as on a GPU: float32, shaped
            like keys and values without head_dim. Empty otherwise.
        states: Float32 [num_recurrent_layers, num_blocks, state_size]; the states after the last token of each block.
        block_hashes: [num_blocks], content hashes kept by KeptBlocks; in the shared store if there is one.
    """

    def __init__(
        self,
        description: DecoderDescription,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        store: KvStore | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._has_scales = dtype == torch.float8_e4m3fn or (dtype == torch.int8 and device.type != "cpu")
        shape = (
            description.num_attention_layers,
            num_blocks,
            tokens_per_block,
            description.num_kv_heads,
            description.cached_dim if self._has_scales else stored_head_dim(description.cached_dim, dtype),
        )
        self.key_scales, self.value_scales = (
            _zeros(shape[:-1] if self._has_scales else (0, num_blocks), torch.float32, device) for _ in range(2)
        )
        self.states = _zeros(
            (description.num_recurrent_layers, num_blocks, description.state_size), torch.float32, device
        )
        self._store = store
        self._memory = None
        self.tiers: KvTiers | None = None
        self.fetcher: BlockFetcher | None = None
        self.server: BlockServer | None = None
        if store is not None:
            self._memory = store.make_pool(num_blocks, int(np.prod(shape[2:])) * dtype.itemsize)
        if self._memory is None:
            self.keys = _zeros(shape, dtype, device)
            self.values = _zeros((*shape[:-1], 0) if description.latent else shape, dtype, device)
            self.block_hashes = np.zeros(num_blocks, dtype=np.uint64)
        else:
            self.keys, self.values = (
                torch.from_numpy(data.reshape(-1)).view(dtype).view(shape)
                for data in (self._memory.keys, self._memory.values)
            )
            self.block_hashes = self._memory.hashes

    def scales(self, layer: int) -> KvScales | None:
        """Return the separate scales of a layer in a quantized cache; None if the cache has no separate scales."""
        return KvScales(self.key_scales[layer], self.value_scales[layer]) if self._has_scales else None

    @property
    def num_bytes(self) -> int:
        """Number of bytes used by keys, values, scales and states."""
        parts = self.keys, self.values, self.key_scales, self.value_scales, self.states
        return sum(part.nbytes for part in parts)

    @property
    def block_bytes(self) -> int:
        """Number of bytes of one block in all layers of this pool."""
        return self.num_bytes // self.num_blocks

    def release(self) -> None:
        """Free the pool's memory, except in a shared store. The pool must not be used afterwards."""
        empty = self.keys.new_empty(0)
        self.keys = self.values = self.key_scales = self.value_scales = self.states = empty

    def use_tiers(self, open_tiers: OpenTiers) -> None:
        """Store full blocks in tiers and fetch blocks from them."""
        self.tiers = open_tiers(self.memory)

    @functools.cached_property
    def memory(self) -> BlockPool:
        """The blocks of the pool, as bytes."""
        if self._has_scales or self.keys.device.type != "cpu":
            parts = self.keys, self.values, self.key_scales, self.value_scales, self.states
            return DevicePool(self.block_hashes, parts)
        keys, values, states = (
            cache.view(torch.uint8)
            .numpy()
            .reshape(*cache.shape[:2], int(np.prod(cache.shape[2:])) * cache.element_size())
            for cache in (self.keys, self.values, self.states)
        )
        return PoolMemory(self.block_hashes, keys, values, states)

    @property
    def store(self) -> KvStore | None:
        """Return the store that contains the pool; None if it is in private memory."""
        return self._store if self._memory is not None else None

    @property
    def store_name(self) -> str:
        """Name of the store from which other workers can fetch these blocks; empty if there is none."""
        return self.store.name if self.store is not None else ""

    @property
    def transfer_kind(self) -> str:
        """Kind of the blocks that this worker offers or fetches; empty if it does neither."""
        transfers = self.server or self.fetcher
        return "" if transfers is None else transfers.kind.hex()

    def use_transfer_kind(self, kind: bytes) -> None:
        """Replace the kind of the blocks that this worker offers or fetches from now on. Any thread."""
        for part in (self.server, self.fetcher):
            if part is not None:
                part.kind = kind

    def leave(self) -> bool:
        """Leave the blocks to other workers on the host; return False if these cannot copy them."""
        return self._store is not None and self._store.leave_pool()

    def close(self) -> None:
        """Remove the pool from the store, and stop storing blocks in tiers."""
        if self.fetcher is not None:
            self.fetcher.close()
        if self.server is not None:
            self.server.close()
        if self.tiers is not None:
            self.tiers.close()
        if self._store is not None:
            self._store.close()

    def adopt(self, hashes: NDArray[np.uint64], targets: IntArray) -> IntArray:
        """Fill blocks with data from prefill workers, tiers or dead workers' pools; return the blocks that were not
        found.

        Args:
            hashes: [N], content hashes of the blocks.
            targets: [N], blocks of the pool to fill.
        """
        missing = targets
        if self.fetcher is not None:
            missing = self.fetcher.take(hashes, targets, self.memory)
        if self.tiers is not None and len(missing):
            missing = self.tiers.fetch(hashes[np.isin(targets, missing)], missing)
        # This comes last, because it waits briefly until the locks of workers that have just died are released.
        if self._store is not None and self._memory is not None and len(missing):
            missing = self._store.fetch(hashes[np.isin(targets, missing)], missing, self._memory)
        return missing

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Copy whole blocks in all layers; all sources are read before any target is written."""
        source, target = torch.from_numpy(sources).long(), torch.from_numpy(targets).long()
        for cache in (self.keys, self.values, self.states, self.key_scales, self.value_scales):
            cache[:, target.to(cache.device)] = cache[:, source.to(cache.device)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros allocate pages only when these are written.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def block_bytes(description: DecoderDescription, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of one block in all layers, including recurrent states."""
    head_bytes = stored_head_dim(description.cached_dim, dtype) * dtype.itemsize
    if dtype == torch.float8_e4m3fn:
        head_bytes += torch.float32.itemsize
    num_tensors = 1 if description.latent else 2
    num_heads = description.num_attention_layers * description.num_kv_heads
    num_states = description.num_recurrent_layers * description.state_size
    return num_tensors * num_heads * head_bytes * tokens_per_block + num_states * torch.float32.itemsize


def free_memory_bytes(device: torch.device) -> int:
    """Return how much more memory can be allocated on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Imported here because the GPU benchmarks run without psutil.
    import psutil

    return int(psutil.virtual_memory().available)


def choose_num_blocks(
    bytes_per_block: int,
    tokens_per_block: int,
    *,
    free_memory_fraction: float,
    max_kv_tokens: int,
    max_useful_tokens: int,
    device: torch.device,
    free_bytes: int,
) -> int:
    """Return the number of blocks in the pool.

    Args:
        bytes_per_block: Bytes of a block over all layers.
        free_memory_fraction: Fraction of the free memory to use on a GPU; a CPU worker uses a quarter of that, at most
            4 GiB.
        max_kv_tokens: Upper limit of the pool's size in tokens; 0 means none.
        max_useful_tokens: Number of tokens in the largest batch of the longest sequences.

    Raises:
        ConfigError: No block fits.
    """
    if not 0.0 < free_memory_fraction <= 1.0:
        raise ConfigError(f"is {free_memory_fraction}; must be above 0 and at most 1", field="free_memory_fraction")
    budget = free_bytes * free_memory_fraction
    if device.type != "cuda":
        budget = min(budget * _CPU_SHARE, _CPU_MAX_BYTES)
    num_blocks = min(int(budget) // max(bytes_per_block, 1), -(-max_useful_tokens // tokens_per_block))
    if max_kv_tokens:
        num_blocks = min(num_blocks, max_kv_tokens // tokens_per_block)
    if num_blocks < 1:
        raise ConfigError("no KV block fits; raise max_kv_tokens or free_memory_fraction", field="max_kv_tokens")
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB", num_blocks, tokens_per_block, num_blocks * bytes_per_block / 2**30
    )
    return num_blocks
