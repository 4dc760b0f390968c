"""The choice of the GPU, and the memory left for steps and graphs, with stand-ins for CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kernels
from benchmarks.gpu.model import CONFIG_8B, random_decoder, random_runner
from gpu_worker import device_memory
from gpu_worker.device_memory import WarmUpMemory
from gpu_worker.kv.cache import KvCache
from gpu_worker.models import loader
from gpu_worker.models.decoder import Decoder, ForwardInputs, Probe
from gpu_worker.models.families import describe
from gpu_worker.models.loader import LoadedModel
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of
from kernels import AttentionCase, dispatch
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder

TINY = CONFIG_8B | {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return a list that receives the devices that become current; the machine appears to have two GPUs."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "taken"),
    [
        ("auto", Ranks(), "cuda:0"),
        ("cuda", Ranks(), "cuda:0"),
        ("cuda:1", Ranks(), "cuda:1"),
        ("cuda", Ranks(rank=1, world_size=2, local_rank=1, tensor_size=2), "cuda:1"),
    ],
)
def test_the_device_becomes_the_current_one(chosen: list[torch.device], name: str, ranks: Ranks, taken: str) -> None:
    assert loader.use_device(WorkerConfig(device=name), ranks) == torch.device(taken)
    assert chosen == [torch.device(taken)]


def test_a_missing_device_is_rejected(chosen: list[torch.device]) -> None:
    with pytest.raises(ConfigError, match="no device 'cuda:2'"):
        loader.use_device(WorkerConfig(device="cuda:2"))
    assert chosen == []


def test_the_device_is_set_before_anything_is_loaded(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    def fail(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(loader, "_describe_native", fail)
    with pytest.raises(InterruptedError):
        loader.load_model(WorkerConfig(device="cuda:1"), open_model_folder(str(tiny_folder)))
    assert chosen == [torch.device("cuda:1")]


def test_the_settings_of_kernels_are_applied_before_a_model_is_loaded(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    applied: list[object] = []

    def fail(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "_describe_native", fail)
    monkeypatch.setattr(kernels, "set_float8_inputs", applied.append)
    monkeypatch.setattr(kernels, "set_batch_invariant", lambda *arguments: applied.append(arguments))
    every: list[dict[str, Any]] = [{"activations": "f8"}, {"batch_invariant": True, "max_sequence_length": 100}]
    for settings in every:
        with pytest.raises(InterruptedError):
            loader.load_beside(WorkerConfig(device="cuda:1", **settings), open_model_folder(str(tiny_folder)))
    assert applied == [True, (False, 512), False, (True, 100)]


def test_attention_is_chosen_for_the_heads_of_this_rank(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    description, device = describe(CONFIG_8B), torch.device("cuda:1")
    shard = shard_of(description, Ranks(rank=1, world_size=2, tensor_size=2))
    model = LoadedModel(description, cast("Decoder", None), device, torch.bfloat16, torch.float8_e4m3fn, divided=shard)
    chosen: list[object] = []
    monkeypatch.setattr(loader, "load_beside", lambda *_: model)
    monkeypatch.setattr(kernels, "choose_attention", lambda *arguments: chosen.append(arguments))
    config, folder = WorkerConfig(attention="flashinfer", tokens_per_block=64), open_model_folder(str(tiny_folder))
    loader.load_model(config, folder)
    case = AttentionCase(torch.bfloat16, torch.float8_e4m3fn, 16, 4, 128, 64, 0.0)
    assert chosen == [("flashinfer", case, device)]
    latent = replace(shard.part, latent=cast("Any", object()))
    model = replace(model, divided=replace(shard, part=latent))
    loader.load_model(config, folder)
    assert chosen[1:] == [("triton", case, device)]

    def refuse(*_: object) -> None:
        raise ValueError("FlashInfer needs a KV cache in bfloat16")

    monkeypatch.setattr(kernels, "choose_attention", refuse)
    with pytest.raises(ConfigError, match="attention: FlashInfer needs"):
        loader.load_model(config, folder)


class FakeMemory:
    """A stand-in for a device of 1000 bytes with PyTorch's caching allocator."""

    def __init__(self) -> None:
        self.elsewhere = self.in_use = self.cached = self.peak = 0

    def allocate(self, size: int) -> None:
        self.cached -= min(self.cached, size)
        self.in_use += size
        self.peak = max(self.peak, self.in_use + self.cached)

    def free(self, size: int) -> None:
        self.in_use -= size
        self.cached += size

    def synchronize(self, device: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.in_use + self.cached

    def memory_reserved(self, device: torch.device) -> int:
        return self.in_use + self.cached

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak

    def free_bytes(self, device: torch.device) -> int:
        return 1000 - self.elsewhere - self.in_use - self.cached


def test_steps_and_graphs_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMemory()
    monkeypatch.setattr(device_memory, "cuda", fake)
    monkeypatch.setattr(device_memory, "free_memory_bytes", fake.free_bytes)
    fake.allocate(300)  # weights
    fake.allocate(40)  # the KV pool of the warm-up
    pool = SimpleNamespace(num_bytes=40)
    memory = WarmUpMemory(torch.device("cuda:0"), [pool])  # type: ignore[list-item]
    fake.allocate(150)  # a step
    fake.free(150)

    def capture() -> None:
        fake.empty_cache()  # as PyTorch does before it records a graph
        fake.allocate(60)
        fake.elsewhere += 10  # memory that the driver allocates for a graph

    memory.record(capture)
    # The runner drops the graphs before it allocates the pool.
    fake.free(60)
    fake.elsewhere -= 10
    assert (memory.step_bytes, memory.graph_bytes) == (150, 70)
    assert memory.free_bytes() == 1000 - 300 - 150 - 70


def test_the_pool_is_sized_after_full_batches_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, events = random_decoder(TINY, torch.device("cpu"), torch.float32), list[object]()
    sizes = set[int]()
    forward = decoder.forward

    def note(inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        events.append(len(inputs.sampled))
        if "recorded" not in events:
            sizes.add(len(inputs.token_ids))
        return forward(inputs, probe)

    monkeypatch.setattr(decoder, "forward", note)
    free_bytes = WarmUpMemory.free_bytes

    def note_free(memory: WarmUpMemory) -> int:
        gc.collect()
        events.append("sized")
        return free_bytes(memory)

    monkeypatch.setattr(WarmUpMemory, "free_bytes", note_free)
    record = WarmUpMemory.record

    def note_record(memory: WarmUpMemory, capture: Callable[[], None]) -> None:
        events.append("recorded")
        record(memory, capture)

    monkeypatch.setattr(WarmUpMemory, "record", note_record)
    runner = random_runner(
        TINY, decoder, torch.device("cpu"), runs_ahead=True, max_batch_size=6, max_num_tokens=16, max_kv_tokens=512
    )
    before = events[: events.index("sized")]
    eager = before[: before.index("recorded")]
    # Each of the four ways of sampling runs one prefill and two decode steps of six rows.
    assert eager.count(6) == 12
    assert max(sizes) == 16  # the longest prompt that fits in a step
    # Recording starts with the largest batch. It is repeated on the real pool, followed by the largest steps.
    assert before[len(eager) :] == ["recorded", 6]
    after = events[events.index("sized") + 1 :]
    assert after.count(6) == 13
    runner.close()


def test_the_pool_of_the_warm_up_is_freed_before_the_final_one_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, sizes = list[KvCache](), list[list[int]]()
    make = KvCache.__init__

    def note(pool: KvCache, *args: Any) -> None:
        sizes.append([other.num_bytes for other in pools])
        make(pool, *args)
        pools.append(pool)

    monkeypatch.setattr(KvCache, "__init__", note)
    cpu = torch.device("cpu")
    runner = random_runner(TINY, random_decoder(TINY, cpu, torch.float32), cpu, runs_ahead=True, max_kv_tokens=512)
    assert sizes == [[], [0]]
    assert runner.kv.num_bytes > 0
    runner.close()


def test_attention_is_recorded_only_if_tritons_kernels_take_its_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_HAS_TRITON", True)
    assert [kernels.can_record_attention(dim) for dim in (64, 256, 288)] == [True, True, False]
    monkeypatch.setattr(dispatch, "_HAS_TRITON", False)
    assert not kernels.can_record_attention(64)
