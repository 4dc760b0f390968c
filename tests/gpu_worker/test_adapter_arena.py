"""Placement of adapters in preallocated memory, and their use by graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.model import random_decoder
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora import cache
from gpu_worker.lora.adapter import Adapter, LoraPair
from gpu_worker.lora.arena import AdapterArena, PlacedAdapter
from gpu_worker.lora.inputs import AdapterTokens
from gpu_worker.models.families import describe
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of
from gpu_worker.parallel.shard_adapters import adapter_part
from midstream.config import WorkerConfig
from midstream.errors import OverloadedError
from tests.gpu_worker.lazy_stream import LazyStream
from tests.gpu_worker.test_cuda_path import BLOCK, LENGTH, NUM_BLOCKS, TINY, TOKENS, step_inputs

if TYPE_CHECKING:
    from gpu_worker.models.loader import LoadedModel

CPU = torch.device("cpu")
HIDDEN = TINY["hidden_size"]
ONE_PAIR = 8 * 2 * HIDDEN  # elements of the two LoRA matrices of the attention output layer, for ranks up to 8


def adapter(value: float, rank: int, *, layer: int = 0) -> Adapter:
    """Return an adapter that adds value * rank * sum(x) to the attention output of one layer."""
    pair = LoraPair(torch.full((rank, HIDDEN), value), torch.ones(HIDDEN, rank), 1.0)
    return Adapter("", f"{value}", tuple({"o": pair} if i == layer else {} for i in range(2)))


def tokens(*placed: PlacedAdapter | None) -> AdapterTokens[PlacedAdapter]:
    """Return one token for each adapter."""
    used = tuple(dict.fromkeys(item for item in placed if item is not None))
    indices = [-1 if item is None else used.index(item) for item in placed]
    return AdapterTokens(tuple(map(str, range(len(used)))), used, torch.tensor(indices, dtype=torch.int32))


def added(arena: AdapterArena, *placed: PlacedAdapter | None, layer: int = 0) -> list[float]:
    return added_by(arena, arena.slots(tokens(*placed)), layer)


def added_by(arena: AdapterArena, slots: Tensor, layer: int = 0) -> list[float]:
    y = torch.zeros(len(slots), HIDDEN)
    arena.add(slots, layer, "o", torch.ones(len(slots), HIDDEN) / HIDDEN, y)
    assert (y == y[:, :1]).all()
    return y[:, 0].tolist()


def test_adapters_are_compacted_if_free_space_is_fragmented() -> None:
    arena = AdapterArena(describe(TINY), 4 * ONE_PAIR * 4, 16, torch.float32, CPU)
    first, second, third, fourth = (arena.place(adapter(value, 2)) for value in (1.0, 2.0, 3.0, 4.0))
    assert added(arena, third, None, first, fourth) == pytest.approx([6, 0, 2, 8])
    assert added(arena, third, layer=1) == [0.0]
    with pytest.raises(OverloadedError):
        arena.place(adapter(5.0, 2))
    del first, third
    wide = arena.place(adapter(5.0, 16))  # as large as the two removed adapters together
    assert added(arena, wide, second, fourth) == pytest.approx([80, 4, 8])


def test_adapters_are_exchanged_behind_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second adapter takes over the memory and the slot of the first, which a launched step has not used yet."""
    arena = AdapterArena(describe(TINY), 2 * ONE_PAIR * 4, 16, torch.float32, CPU)
    stream, results = LazyStream(monkeypatch), list[list[float]]()
    for value, rank in ((1.0, 2), (5.0, 16)):
        placed = arena.place(adapter(value, rank))
        slots = arena.slots(tokens(placed))
        stream.launch(lambda slots=slots: results.append(added_by(arena, slots)))  # type: ignore[misc]
        assert placed.slot == 0
        del placed
    assert stream.num_done == 0
    stream.run(stream.num_launched)
    assert results == [pytest.approx([2]), pytest.approx([80])]


def test_adapters_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From other memory, copies to a GPU would block."""
    arena = AdapterArena(describe(TINY), ONE_PAIR * 4, 8, torch.float32, CPU)
    monkeypatch.setattr(arena, "_device", torch.device("cuda"))
    pinned, copied = list[int](), list[int]()
    zeros, copy = torch.zeros, Tensor.copy_

    def zeros_in(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        made = zeros(*shape, **settings)
        return made.pin_memory() if pin_memory else made

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    def copy_from(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied.append(source.data_ptr())
        assert non_blocking
        return copy(target, source)

    monkeypatch.setattr(torch, "zeros", zeros_in)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "copy_", copy_from)
    arena.place(adapter(1.0, 2))
    assert len(copied) == 2
    assert copied == pinned


def test_the_reader_packs_adapters_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing an adapter of 84 MB in the compute loop would delay the steps in flight."""
    decoder = random_decoder(TINY, CPU, torch.float32)
    decoder.reserve_adapters(ONE_PAIR * 4, 8)
    packers = list[str]()
    pack = decoder.packed_adapter

    def note(read: Adapter) -> Adapter:
        packers.append(threading.current_thread().name)
        return pack(read)

    monkeypatch.setattr(decoder, "packed_adapter", note)
    monkeypatch.setattr(cache, "read_adapter", lambda path, *_, **__: adapter(1.0, 2))
    model = SimpleNamespace(
        description=describe(TINY),
        decoder=decoder,
        device=torch.device("cuda"),
        dtype=torch.float32,
        adapter_bytes=ONE_PAIR * 4,
        takes_lora=True,
        divided=None,
    )
    adapters = cache.adapter_cache(WorkerConfig(), cast("LoadedModel", model), decoder.place_adapter)
    read = adapters.load("folder").result()
    adapters.close()
    assert read.packed is not None
    assert [name.startswith("adapter-reader") for name in packers] == [True]


def test_a_rank_packs_its_part_of_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks multiplies the last three of six heads, in columns 24 to 47."""
    whole = describe(TINY)
    shard = shard_of(whole, Ranks(1, 2, tensor_size=2))
    decoder = random_decoder(TINY, CPU, torch.float32, shard)
    decoder.reserve_adapters(ONE_PAIR * 4, 8)
    pair = LoraPair(torch.arange(HIDDEN)[None].float(), torch.ones(HIDDEN, 1), 1.0)
    monkeypatch.setattr(cache, "read_adapter", lambda path, *_, **__: Adapter("", "", ({"o": pair}, {})))
    model = SimpleNamespace(
        description=whole,
        decoder=decoder,
        device=torch.device("cuda"),
        dtype=torch.float32,
        adapter_bytes=ONE_PAIR * 4,
        takes_lora=True,
        divided=shard,
    )
    adapters = cache.adapter_cache(WorkerConfig(), cast("LoadedModel", model), decoder.place_adapter)
    placed = decoder.place_adapter(adapter_part(adapters.load("folder").result(), shard))
    adapters.close()
    y = torch.zeros(1, HIDDEN)
    decoder._adapters.add(torch.tensor([placed.slot], dtype=torch.int32), 0, "o", torch.ones(1, HIDDEN // 2), y)
    assert y.tolist() == [[sum(range(24, 48))] * HIDDEN]


def test_experts_of_ranks_are_not_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(TINY, CPU, torch.float32)
    found = list[bool]()

    def read(path: str, *_: object, takes_expert_lora: bool, **__: object) -> Adapter:
        found.append(takes_expert_lora)
        return Adapter("", "")

    monkeypatch.setattr(cache, "read_adapter", read)
    for divided in (None, shard_of(describe(TINY), Ranks(0, 2, tensor_size=2))):
        model = SimpleNamespace(
            description=describe(TINY),
            decoder=decoder,
            device=CPU,
            dtype=torch.float32,
            adapter_bytes=0,
            takes_lora=True,
            divided=divided,
        )
        adapters = cache.adapter_cache(WorkerConfig(), cast("LoadedModel", model), decoder.place_adapter)
        adapters.load("folder").result()
        adapters.close()
    assert found == [True, False]


def replays(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


def test_graphs_run_with_adapters() -> None:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    decoder.reserve_adapters(2 * ONE_PAIR * 4, 8)
    num_recorded = 0

    def record(run: Callable[[], object]) -> Callable[[], None]:
        nonlocal num_recorded
        num_recorded += 1
        return replays(run)

    graphs = GraphDecoder(
        decoder,
        CPU,
        max_batch_size=4,
        max_num_tokens=96,
        max_blocks=NUM_BLOCKS,
        make_recorder=lambda: record,
        takes_adapters=True,
    )
    graphs.use_cache(KvCache(describe(TINY), 3 * NUM_BLOCKS, BLOCK, torch.float32, CPU))
    one, other = (decoder.place_adapter(adapter(value, 3)) for value in (0.5, -0.25))
    graphs.forward(step_inputs(TOKENS[:, :-1], 0))
    inputs = step_inputs(TOKENS[:, -1:], LENGTH - 1)
    adapted = replace(inputs, adapters=tokens(other, None, one))
    plain, eager = graphs.forward(inputs), graphs.forward(adapted)
    graphs.capture()
    # There are batches of 1, 2 and 4 rows and mixed steps of 32 and 64 tokens, each with and without adapters.
    assert num_recorded == 10
    torch.testing.assert_close(graphs.forward(adapted), eager, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graphs.forward(inputs), plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(eager[1], plain[1])
    assert not torch.allclose(eager[0], plain[0], atol=1e-3)
