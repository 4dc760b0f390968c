"""A float8 KV cache with separate scales in the layout for GPUs, tested on a CPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.model import TINY, TOKENS_PER_BLOCK, random_decoder, random_runner, step_inputs
from gpu_worker.batch.step import NewSequence, SamplingParams, Step
from gpu_worker.kv.cache import KvCache, block_bytes
from gpu_worker.models import loader
from gpu_worker.models.families import describe
from kernels import dispatch
from kernels import triton as operations
from midstream.config import WorkerConfig
from midstream.errors import MidstreamError, UnsupportedError
from tests.gpu_worker.tiny_models import ints

CPU, META, FLOAT8 = torch.device("cpu"), torch.device("meta"), torch.float8_e4m3fn


def pool(dtype: torch.dtype, device: torch.device = CPU) -> KvCache:
    return KvCache(describe(TINY), 8, TOKENS_PER_BLOCK, dtype, device)


@pytest.mark.parametrize(("dtype", "device"), [(FLOAT8, CPU), (FLOAT8, META), (torch.int8, META)])
def test_a_block_has_one_byte_per_element_and_one_scale_per_head(dtype: torch.dtype, device: torch.device) -> None:
    kv, d = pool(dtype, device), describe(TINY)
    heads = d.num_layers * TOKENS_PER_BLOCK * d.num_kv_heads
    assert kv.num_bytes == 8 * block_bytes(d, TOKENS_PER_BLOCK, dtype) == 8 * 2 * heads * (d.head_dim + 4)
    scales = kv.scales(1)
    assert scales is not None
    assert scales.keys.shape == kv.keys.shape[1:-1]


def test_other_caches_have_no_scales() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert pool(dtype).scales(0) is None


def test_logits_are_near_those_over_a_cache_in_the_compute_type(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    prompt, following = (step_inputs(1, count, 20, TINY["vocab_size"]) for count in (20, 1))
    following = replace(following, block_tables=prompt.block_tables, slot_mapping=prompt.slot_mapping[-1:])

    def logits(dtype: torch.dtype) -> torch.Tensor:
        decoder.use_cache(pool(dtype))
        decoder.forward(prompt)
        return decoder.forward(following)

    exact, rounded = logits(torch.float32), logits(FLOAT8)
    assert not torch.equal(exact, rounded)
    # Three mantissa bits give a relative error of at most 1/16 in keys and values.
    assert (rounded - exact).norm() < exact.norm() / 16
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    # A value halfway between two float8 values may be rounded in the other direction if an earlier product was rounded
    # differently.
    assert (logits(FLOAT8) - exact).norm() < exact.norm() / 16


def test_copied_blocks_keep_their_scales() -> None:
    kv = pool(FLOAT8)
    kv.key_scales[:, 2], kv.value_scales[:, 2] = 3.0, 4.0
    kv.copy_blocks(ints([2]), ints([5]))
    assert (kv.key_scales[:, 5] == 3.0).all()
    assert (kv.value_scales[:, 5] == 4.0).all()


def test_a_rows_tokens_do_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    runner = random_runner(
        TINY,
        decoder,
        CPU,
        runs_ahead=True,
        kv_dtype=FLOAT8,
        max_kv_tokens=128,
        max_batch_size=4,
        max_sequence_length=32,
        num_threads=1,
    )
    prompts = [[1, 2, 3, 4, 5], [7, 8], [9] * 20]

    def run(rows: list[int]) -> dict[int, list[int]]:
        runner.clear()
        new = tuple(
            NewSequence(
                row=row,
                token_ids=ints(prompts[row]),
                num_prompt_tokens=len(prompts[row]),
                block_ids=ints([2 * row, 2 * row + 1]),
                sampling=SamplingParams(seed=row),
            )
            for row in rows
        )
        lengths = ints([len(prompts[row]) for row in rows])
        steps = [Step(new_sequences=new, context_rows=ints(rows), context_starts=0 * lengths, context_lengths=lengths)]
        steps += [Step(generation_rows=ints(rows))] * 4
        outputs = [runner.run_step(step).token_ids.tolist() for step in steps]
        return {row: [tokens[place] for tokens in outputs] for place, row in enumerate(rows)}

    together = run([0, 1, 2])
    assert {row: run([row])[row] for row in range(3)} == together
    runner.close()


@pytest.mark.parametrize(
    ("kv", "device", "capability", "reason"),
    [
        ("int8", "cpu", (0, 0), "needs the CPU kernels or a GPU"),
        ("f8", "cpu", (0, 0), "needs a GPU"),
        ("int16", "cuda", (9, 0), "on a GPU use int8 or f8"),
        ("f8", "cuda", (8, 0), "has no float8"),
    ],
)
def test_cache_types_that_a_device_does_not_support_are_rejected(
    monkeypatch: pytest.MonkeyPatch, kv: str, device: str, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(UnsupportedError, match=reason):
        loader._kv_dtype(WorkerConfig(kv=kv), torch.device(device), torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "capability", "settings", "reason"),
    [
        ("cpu", (0, 0), {}, "needs a GPU of compute capability 9.0"),
        ("cuda", (8, 9), {}, "needs a GPU of compute capability 9.0"),
        ("cuda", (9, 0), {"batch_invariant": True}, "not batch-invariant"),
        ("cuda", (9, 0), {}, ""),
    ],
)
def test_float8_activations_are_rejected_if_not_supported(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], settings: dict[str, bool], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = WorkerConfig(activations="f8", **settings)  # type: ignore[arg-type]
    with pytest.raises(MidstreamError, match=reason) if reason else contextlib.nullcontext():
        loader._check_activations(config, torch.device(device))


def test_cache_types_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    taken = [
        loader._kv_dtype(WorkerConfig(kv=kv), torch.device("cuda"), torch.bfloat16) for kv in ("auto", "int8", "f8")
    ]
    assert taken == [torch.bfloat16, torch.int8, FLOAT8]
