"""Attention by flash-attn and FlashInfer: their arguments, the choice between them and Triton, and rejected
settings.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from benchmarks.gpu.model import TINY, random_decoder
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.models.families import describe
from kernels import AttentionCase, KvScales, attention_choice, dispatch, flashinfer_attention
from kernels.attention import paged_attention
from kernels.attention_backend import AttentionBackend
from kernels.attention_choice import DECODES, PROMPTS, AttentionChoice, installed, measured, requested
from kernels.flash_attention import load_flash_attention
from kernels.flashinfer_attention import load_flashinfer
from midstream.errors import ConfigError
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model
from tests.kernels import exact, fake_attention
from tests.kernels.paged import paged_batch

HOPPER, BLACKWELL, DESKTOP_BLACKWELL, AMPERE = (9, 0), (10, 0), (12, 0), (8, 0)
CPU = torch.device("cpu")
CASE = AttentionCase(torch.bfloat16, torch.bfloat16, 8, 2, 64, 256)
# By the name that this file uses for a package: module, name and stand-in of each of its functions.
MODULES: dict[str, tuple[tuple[str, str, Callable[..., Any]], ...]] = {
    "2": (("flash_attn", "flash_attn_varlen_func", fake_attention.flash_attn_varlen_func),),
    "3": (("flash_attn_interface", "flash_attn_with_kvcache", fake_attention.flash_attn_with_kvcache),),
    "4": (("flash_attn.cute", "flash_attn_varlen_func", fake_attention.cute_flash_attn_varlen_func),),
    "flashinfer": tuple(
        (f"flashinfer.{module_name}", function.__name__, function)
        for module_name, function in (
            ("decode", fake_attention.trtllm_batch_decode_with_kv_cache),
            ("prefill", fake_attention.trtllm_batch_context_with_kv_cache),
        )
    ),
}


@pytest.fixture(autouse=True)
def _none_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_BYTES", 64)
    caches = (load_flash_attention, load_flashinfer, flashinfer_attention._workspace)
    for cache in caches:
        cache.cache_clear()
    install(monkeypatch)
    yield
    for cache in caches:
        cache.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make only these packages importable."""
    for name, functions in MODULES.items():
        for module_name, function_name, function in functions:
            module = ModuleType(module_name)
            vars(module)[function_name] = function
            monkeypatch.setitem(sys.modules, module_name, module if name in names else None)
    load_flash_attention.cache_clear()
    load_flashinfer.cache_clear()


@pytest.mark.parametrize(
    ("packages", "capability", "found"),
    [
        ("", HOPPER, []),
        ("2 3 4", HOPPER, ["flash-attn 3"]),
        ("2 4", HOPPER, ["flash-attn 2"]),  # version 4 has no paged cache for this capability
        ("2 3 4", BLACKWELL, ["flash-attn 4"]),
        ("3", BLACKWELL, []),
        ("4", DESKTOP_BLACKWELL, []),
        ("2 3 4 flashinfer", AMPERE, ["flash-attn 2"]),
        ("2 flashinfer", HOPPER, ["flash-attn 2", "FlashInfer"]),
        ("flashinfer", DESKTOP_BLACKWELL, ["FlashInfer"]),
    ],
)
def test_packages_that_run_on_a_device(
    monkeypatch: pytest.MonkeyPatch, packages: str, capability: tuple[int, int], found: list[str]
) -> None:
    install(monkeypatch, *packages.split())
    assert [backend.name for backend in installed(capability).values()] == found


@settings(max_examples=10, derandomize=True)
@given(
    package=st.sampled_from(
        [("2", AMPERE), ("3", HOPPER), ("4", BLACKWELL), ("flashinfer", HOPPER), ("flashinfer", BLACKWELL)]
    ),
    contexts=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    queries=st.integers(1, 40),
    block_size=st.sampled_from([16, 64, 256, 512]),
    window=st.sampled_from([None, 1, 100]),
    softcap=st.sampled_from([0.0, 1.5]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_they_compute_paged_attention(
    package: tuple[str, tuple[int, int]],
    contexts: list[int],
    queries: int,
    block_size: int,
    window: int | None,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    """If a package needs smaller blocks, each block is passed as several; if it needs larger blocks, the keys and
    values are copied.
    """
    torch.manual_seed(0)
    name, capability = package
    single = name == "flashinfer" and capability == HOPPER
    batch = paged_batch(contexts, [1 if single else min(length, queries) for length in contexts], block_size)
    num_tokens = int(batch.query_starts[-1])
    q = torch.randn(num_tokens, 6, 64).to(dtype)
    keys, values = torch.randn(2, batch.num_blocks, block_size, 2, 64).to(dtype).unbind()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, name)
        (backend,) = installed(capability).values()
        case = AttentionCase(dtype, dtype, 6, 2, 64, block_size, softcap, has_single_queries=single)
        if name == "flashinfer" and softcap:
            assert backend.refusal(case) == "scores without a soft cap"
            return
        assert backend.refusal(case) is None
        tables = (batch.block_tables.clamp(min=0), batch.query_starts, batch.context_lens)
        out = backend(q, keys, values, *tables, 0.3, window, softcap, None)
    expected = exact.attention(q, keys, values, batch, 0.3, window, softcap)
    assert exact.error(out, expected) < (1e-3 if dtype == torch.float16 else 5e-3)


@pytest.mark.parametrize(
    ("package", "capability", "change", "reason"),
    [
        ("2", AMPERE, {"block_size": 48}, "blocks of a multiple of 256 tokens, not 48"),
        ("4", BLACKWELL, {"block_size": 48}, "blocks of a multiple of 128 tokens, not 48"),
        ("4", BLACKWELL, {"head_dim": 256}, "heads of a multiple of 8 elements, at most 128, not 256"),
        ("3", HOPPER, {"head_dim": 60}, "heads of a multiple of 8 elements, at most 256, not 60"),
        ("3", HOPPER, {"kv_dtype": torch.int8}, "a KV cache in bfloat16, not int8"),
        ("2", HOPPER, {"dtype": torch.float32}, "16-bit activations, not float32"),
        ("flashinfer", HOPPER, {"head_dim": 96}, "heads of 64, 128 or 256 elements, not 96"),
        ("flashinfer", HOPPER, {"num_heads": 40}, "at most 16 query heads for each KV head, not 20"),
        ("flashinfer", HOPPER, {"softcap": 30.0}, "scores without a soft cap"),
        ("flashinfer", HOPPER, {"block_size": 8}, "blocks of a multiple of 16 tokens, not 8"),
    ],
)
def test_an_impossible_request_is_rejected_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, package: str, capability: tuple[int, int], change: dict[str, Any], reason: str
) -> None:
    setting = "flashinfer" if package == "flashinfer" else "flash-attn"
    with pytest.raises(ValueError, match=f"{setting} is not installed for compute capability"):
        requested(setting, CASE, capability)
    install(monkeypatch, package)
    assert requested(setting, CASE, capability).backends
    with pytest.raises(ValueError, match=f"needs {reason}$"):
        requested(setting, replace(CASE, **change), capability)
    monkeypatch.setattr(dispatch, "_is_batch_invariant", True)
    with pytest.raises(ValueError, match="only Triton's attention is batch-invariant"):
        kernels.choose_attention(setting, CASE, CPU)


def test_a_cpu_worker_refuses_them(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="attention: flash-attn needs a GPU"):
        make_runner(tmp_path, attention="flash-attn")


def test_a_package_limited_to_single_queries_does_not_compute_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flashinfer")
    choice = requested("flashinfer", CASE, HOPPER)
    assert choice.backend(replace(CASE, has_single_queries=True), 3) is not None
    assert choice.backend(CASE, 300) is None
    assert requested("flashinfer", CASE, BLACKWELL).backend(CASE, 300) is not None


@pytest.mark.parametrize(("capability", "count"), [(HOPPER, 1), (BLACKWELL, 1), (BLACKWELL, 3)])
def test_flashinfer_supports_padding_of_recorded_steps(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int
) -> None:
    """The second sequence is padding without keys. It has one query in a decode step, and none in a mixed step."""
    install(monkeypatch, "flashinfer")
    batch = paged_batch([20], [count], 16)
    q = torch.randn(count + 1, 6, 64).bfloat16()
    keys, values = torch.randn(2, batch.num_blocks, 16, 2, 64).bfloat16().unbind()
    tables = torch.nn.functional.pad(batch.block_tables, (0, 0, 0, 1))
    starts = torch.tensor([0, count, 2 if count == 1 else count], dtype=torch.int32)
    lens = torch.tensor([20, 0], dtype=torch.int32)
    (backend,) = installed(capability).values()
    out = backend(q, keys, values, tables, starts, lens, 0.3, None, 0.0, count)
    assert exact.error(out[:count], exact.attention(q[:count], keys, values, batch, 0.3)) < 5e-3


def test_small_blocks_are_copied_only_for_prompts_that_amortize_the_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "2")
    small = replace(CASE, block_size=16)
    choice = requested("flash-attn", small, AMPERE)
    message = "Triton computes the attention of decode steps, because flash-attn 2 needs blocks of a multiple of 256"
    assert message in caplog.text
    backend = installed(AMPERE)["flash-attn"]
    assert choice.backend(replace(small, keys_per_query=4.0), 300) is backend
    many = replace(small, keys_per_query=4.5)
    assert choice.backend(many, 300) is None
    assert backend.refusal(many) == "at most 4 keys for each query, not 4.5, to copy small blocks"
    assert choice.backend(replace(small, has_single_queries=True), 3) is None
    asked: list[AttentionCase] = []

    class Curious(Scripted):
        def refusal(self, case: AttentionCase) -> str | None:
            asked.append(case)
            return backend.refusal(case)

    found = measured([Curious("curious")], lambda q, *_: q, small, CPU, lambda run: float("nan"))
    assert [case.keys_per_query for case in asked] == [4096, 2048, 1024, 1024, 16, 1, 1]
    assert not found.backends


class Scripted:
    """A backend whose run times are determined by the test."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refusal(self, case: AttentionCase) -> str | None:
        return None

    def __call__(self, q: Tensor, *_: Any) -> Tensor:
        return q


def test_the_fastest_by_measurement_is_chosen_for_each_kind_of_step() -> None:
    backends: list[AttentionBackend] = [Scripted("a"), Scripted("b")]
    #                ours  a    b
    rows = {
        DECODES[0]: (10.0, 9.9, 9.8),  # the differences are too small, so our kernel is used
        DECODES[1]: (10.0, 5.0, 6.0),
        DECODES[2]: (10.0, 9.0, 6.0),
        DECODES[3]: (10.0, 20.0, 30.0),
        PROMPTS[0]: (10.0, 20.0, 9.0),
    }
    times = itertools.chain(*rows.values(), itertools.repeat(1.0))
    shapes: list[torch.Size] = []

    def own(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
        shapes.append(q.shape)
        assert int(tables.max()) < len(keys)
        assert int(lens.max()) <= tables.shape[1] * keys.shape[1]
        assert int(starts[-1]) == len(q)
        return q

    def time(run: Callable[[], object]) -> float:
        run()
        return next(times)

    choice = measured(backends, own, CASE, CPU, time)
    assert [choice.backends[kind].name for kind in choice.backends] == ["a", "b", "b"]
    assert shapes == [(kind.num_sequences * kind.num_queries, 8, 64) for kind in (*DECODES, *PROMPTS)]
    single = replace(CASE, has_single_queries=True)
    names = [backend and backend.name for n in (1, 7, 8, 63, 64, 255, 256) if [backend := choice.backend(single, n)]]
    assert names == [None, None, "a", "a", "b", "b", None]
    assert choice.backend(CASE, 40) is backends[1]
    assert choice.backend(CASE, 4000) is None
    assert str(choice) == "a for 8 x 1, b for 64 x 1, b for 1 x 64"


def test_the_time_of_a_run_is_measured_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    milliseconds = iter([50.0, 30.0, 20.0, 40.0, 10.0])

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def record(graph: Graph) -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: object) -> float:
            return next(milliseconds)

    for name, fake in (("CUDAGraph", Graph), ("graph", record), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, fake)
    assert attention_choice.device_seconds(lambda: events.append("run")) == 30e-3 / 10
    assert events == ["run", "begin", *["run"] * 10, "end", "replay", *["event", "replay", "event"] * 5]


def test_auto_compares_with_our_attention_unless_the_process_is_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours: list[tuple[torch.Size, Any]] = []

    def attend(q: Tensor, *args: Any) -> Tensor:
        ours.append((q.shape, args[5:]))
        return q

    def time(run: Callable[[], object]) -> float:
        num_before = len(ours)
        run()
        return 2.0 if len(ours) > num_before else 1.0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(attention_choice, "installed", lambda capability: {"x": Scripted(f"for {capability}")})
    monkeypatch.setattr(attention_choice, "device_seconds", time)
    monkeypatch.setattr(dispatch, "paged_attention", attend)
    monkeypatch.setattr(dispatch, "_attention", attention_choice.OWN)
    case = replace(CASE, softcap=30.0)
    kernels.choose_attention("auto", case, CPU)
    assert ours == [
        ((kind.num_sequences * kind.num_queries, 8, 64), (1 / 8, None, 30.0)) for kind in (*DECODES, *PROMPTS)
    ]
    assert set(dispatch._attention.backends) == {*DECODES, *PROMPTS}
    assert "attention by for (9, 0) for 1 x 1, " in kernels.describe(torch.device("cuda"))
    kernels.choose_attention("triton", case, CPU)
    assert not dispatch._attention.backends
    monkeypatch.setattr(dispatch, "_is_batch_invariant", True)
    kernels.choose_attention("auto", case, CPU)
    assert not dispatch._attention.backends


def test_a_package_that_fails_on_this_machine_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def time(run: Callable[[], object]) -> float:
        run()
        return 1.0

    class Broken(Scripted):
        def __call__(self, q: Tensor, *_: Any) -> Tensor:
            raise RuntimeError("no kernel image is available for execution on the device")

    assert not measured([Broken("broken")], lambda q, *_: q, CASE, CPU, time).backends
    assert "broken fails here and is not used" in caplog.text


@pytest.mark.parametrize("block_size", [256, 16])
def test_steps_of_a_decoder_use_the_chosen_implementation(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    """With large blocks, flash-attn 2 computes prompts, decode steps and padded steps of graphs; with small blocks,
    only prompts.
    """
    torch.manual_seed(0)
    install(monkeypatch, "2")
    backend = installed(AMPERE)["flash-attn"]
    calls: list[int] = []

    class Counted(Scripted):
        def refusal(self, case: AttentionCase) -> str | None:
            return backend.refusal(case)

        def __call__(self, q: Tensor, *args: Any) -> Tensor:
            calls.append(len(q))
            return backend(q, *args)

    config = TINY | {"max_position_embeddings": 1024}
    decoder = random_decoder(config, CPU, torch.bfloat16)
    logits = []
    choices = (attention_choice.OWN, AttentionChoice(dict.fromkeys((*DECODES, *PROMPTS), Counted("counted"))))
    for choice in choices:
        monkeypatch.setattr(dispatch, "_attention", choice)
        graphs = GraphDecoder(
            decoder,
            CPU,
            max_batch_size=4,
            max_num_tokens=1024,
            max_blocks=512 // block_size,
            make_recorder=lambda: recorder,
        )
        graphs.use_cache(KvCache(describe(config), 1536 // block_size, block_size, torch.bfloat16, CPU))
        graphs.capture()
        calls.clear()
        steps = [step(count, start, block_size) for count, start in ((280, 0), (5, 280), (1, 285))]
        logits.append([graphs.forward(inputs).clone() for inputs in steps])
    # The steps run eagerly, in a mixed graph of 32 tokens, and in a decode graph of 4 rows; each has one call per
    # layer.
    num_layers = int(config["num_hidden_layers"])
    recorded = [*[32] * num_layers, *[4] * num_layers] if block_size == 256 else []
    assert calls == [*[3 * 280] * num_layers, *recorded]
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def recorder(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


def step(count: int, start: int, block_size: int) -> ForwardInputs:
    """Extend three sequences by `count` tokens each, starting at position `start`."""
    positions = torch.arange(start, start + count, dtype=torch.int32)
    tables = torch.arange(1536 // block_size, dtype=torch.int32).view(3, -1)
    starts = torch.arange(4, dtype=torch.int32) * count
    return ForwardInputs(
        token_ids=(torch.arange(3 * count, dtype=torch.int32) * 7 + start) % 90,
        positions=positions.repeat(3),
        slot_mapping=(tables[:, positions // block_size] * block_size + positions % block_size).flatten(),
        query_starts=starts,
        context_lens=torch.full((3,), start + count, dtype=torch.int32),
        block_tables=tables,
        sampled=starts[1:] - 1,
    )


def test_calls_with_other_features_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(q: Tensor, *_: Any) -> Tensor:
        raise AssertionError("called")

    monkeypatch.setattr(Scripted, "__call__", refuse)
    monkeypatch.setattr(dispatch, "_attention", AttentionChoice(dict.fromkeys((*DECODES, *PROMPTS), Scripted("x"))))
    batch = paged_batch([20, 9], [4, 1], 16)
    q, cache, sinks = torch.randn(5, 4, 8), torch.randn(batch.num_blocks, 16, 2, 8), torch.randn(4)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    for features in ({"sinks": sinks}, {"chunk": 8}, {"window": 3, "num_sink_tokens": 2}):
        found = kernels.paged_attention(q, cache, cache, *tables, 0.3, **features)
        assert torch.equal(found, paged_attention(q, cache, cache, *tables, 0.3, **features))
    units, scales = cache.to(torch.int8), KvScales(*torch.ones(2, *cache.shape[:-1]).unbind())
    kernels.paged_attention(q, units, units, *tables, 0.3, scales=scales)
    with pytest.raises(AssertionError, match="called"):
        kernels.paged_attention(q, cache, cache, *tables, 0.3)
