"""The operations in each layer of a decode step on a GPU (one launch each), and the graphs of models with experts.

PyTorch's operations compute the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter, LoraPair, expert_shapes, module_shapes
from gpu_worker.lora.arena import PlacedAdapter
from gpu_worker.lora.inputs import AdapterTokens
from gpu_worker.models.decoder import ForwardInputs, TorchDecoder
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families import describe
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from kernels import dispatch
from kernels.activation import activate
from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import make_tiny_model

CPU = torch.device("cpu")
BLOCK, NUM_ROWS, NUM_EXPERTS = 16, 4, 4
EXPERTS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ATTENTION = ["linear", "rotate_and_store", "paged_attention", "linear", "add_rms_norm"]


class Launches:
    """The names of the operations that ran, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        references = vars(dispatch)
        names = ["rms_norm", "add_rms_norm", "apply_rotary", "activate", "gated_linear", "rotate_and_store", "store_kv"]
        names += ["add_lora", "paged_attention", "grouped_linear", "weighted_sum"]
        operations = {name: self.noted(name, references[f"torch_{name}"]) for name in names}
        patch.setattr(dispatch, "triton", SimpleNamespace(**operations), raising=False)
        patch.setattr(dispatch, "torch_linear", self.noted("linear", references["torch_linear"]))
        patch.setattr(dispatch, "_takes_triton", lambda x: True)

    def noted(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            for other in ("is_batch_invariant", "is_partial", "segment_keys", "scales", "max_queries"):
                kwargs.pop(other, None)
            activation = kwargs.pop("activation", None)
            result = run(*args, **kwargs)
            return result if activation is None else activate(result, activation)

        return note


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def load(folder: Path, family: str, **settings: Any) -> tuple[TorchDecoder, DecoderDescription]:
    make_tiny_model(folder, family, num_hidden_layers=2, head_dim=32, **settings)
    opened = open_model_folder(str(folder))
    description = describe(opened.config)
    decoder = TorchDecoder(description, DecoderWeights(opened, description, "f32"), torch.float32, CPU)
    decoder.reserve_adapters(1 << 20, 8)
    decoder.use_cache(cache_for(description))
    return decoder, description


def cache_for(description: DecoderDescription) -> KvCache:
    return KvCache(description, NUM_ROWS, BLOCK, torch.float32, CPU)


def first_tokens(token_ids: list[int]) -> ForwardInputs:
    """Return the inputs of a decode step for sequences of one token each."""
    rows = torch.arange(len(token_ids), dtype=torch.int32)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=torch.zeros_like(rows),
        slot_mapping=rows * BLOCK,
        query_starts=torch.arange(len(token_ids) + 1, dtype=torch.int32),
        context_lens=torch.ones_like(rows),
        block_tables=rows[:, None],
        sampled=rows,
    )


def adapter(description: DecoderDescription, *, of_experts: bool) -> Adapter:
    """Return a random adapter of the attention output or, if requested, of all experts."""
    if of_experts:
        shapes = expert_shapes(description).items()
        pairs = {
            name: LoraPair(torch.randn(NUM_EXPERTS, 2, k), torch.randn(NUM_EXPERTS, n, 2), 0.1)
            for name, (k, n) in shapes
        }
    else:
        inner, outer = module_shapes(description)["o"]
        pairs = {"o": LoraPair(torch.randn(2, inner), torch.randn(outer, 2), 0.1)}
    return Adapter("", f"{of_experts}", (pairs,) * description.num_layers)


def used_by(rows: list[PlacedAdapter | None]) -> AdapterTokens[PlacedAdapter] | None:
    used = tuple(dict.fromkeys(row for row in rows if row is not None))
    indices = torch.tensor([-1 if row is None else used.index(row) for row in rows], dtype=torch.int32)
    return AdapterTokens(tuple(map(str, range(len(used)))), used, indices) if used else None


def test_a_dense_layer_takes_eight_launches(launches: Launches, tmp_path: Path) -> None:
    """The norms of query and key heads are in one launch with the rotary embedding and the write to the cache."""
    decoder, _ = load(tmp_path, "Qwen3")
    decoder.forward(first_tokens([5, 6]))
    feed_forward = ["gated_linear", "linear"]
    head = ["rms_norm", "linear"]
    assert launches.names == ["rms_norm", *ATTENTION, *feed_forward, "add_rms_norm", *ATTENTION, *feed_forward, *head]


@pytest.mark.parametrize("of_experts", [None, False, True])
def test_only_adapters_of_experts_add_launches_to_experts(
    launches: Launches, tmp_path: Path, of_experts: bool | None
) -> None:
    decoder, description = load(tmp_path, "Qwen3Moe", **EXPERTS)
    inputs = first_tokens([5, 6])
    attention = ATTENTION.copy()
    # The experts' gate and up projections and the activation are one launch.
    experts = ["linear", "grouped_linear", "grouped_linear", "weighted_sum"]
    if of_experts is not None:
        placed = decoder.place_adapter(adapter(description, of_experts=of_experts))
        inputs = replace(inputs, adapters=used_by([placed, None]))
        attention[1:1], attention[-1:-1] = ["add_lora"] * 3, ["add_lora"]
    if of_experts:
        experts = ["linear", "grouped_linear", "add_lora", "add_lora", "activate", "grouped_linear", "add_lora"]
        experts.append("weighted_sum")
    decoder.forward(inputs)
    assert launches.names[1 : 1 + len(attention + experts)] == attention + experts
    assert launches.names.count("paged_attention") == 2


def test_adapters_of_experts_have_their_own_graphs(launches: Launches, tmp_path: Path) -> None:
    """A row has the same bits regardless of its neighbors' adapters."""
    torch.manual_seed(0)
    decoder, description = load(tmp_path, "Qwen3Moe", **EXPERTS)
    dense, experts = (decoder.place_adapter(adapter(description, of_experts=kind)) for kind in (False, True))
    recorded: list[list[str]] = []

    def record(step: Callable[[], object]) -> Callable[[], None]:
        launches.names.clear()
        step()
        recorded.append(launches.names.copy())

        def replay() -> None:
            step()

        return replay

    graphs = GraphDecoder(
        decoder,
        CPU,
        max_batch_size=NUM_ROWS,
        max_num_tokens=16,
        max_blocks=1,
        make_recorder=lambda: record,
        takes_adapters=True,
        adapts_experts=True,
    )
    graphs.use_cache(cache_for(description))
    token_ids = [5, 6, 7]

    def run(*rows: PlacedAdapter | None) -> Tensor:
        launches.names.clear()
        inputs = replace(first_tokens(token_ids[: len(rows)]), adapters=used_by(list(rows)))
        return graphs.forward(inputs).clone()

    eager = run(dense, None, experts)
    graphs.capture()
    # There are batches of 1, 2 and 4 rows, each without adapters, with adapters, and with adapters of experts.
    assert [names.count("add_lora") for names in recorded] == [0, 2 * 4, 2 * 7] * 3
    assert torch.equal(run(dense, None, experts), eager)
    assert launches.names.count("add_lora") == 2 * 7
    assert torch.equal(run(dense, None), eager[:2])
    assert launches.names.count("add_lora") == 2 * 4
    assert torch.equal(run(None, None)[1], eager[1])
    assert "add_lora" not in launches.names
    token_ids[:] = [7]
    assert torch.equal(run(experts), eager[2:])
    assert not torch.allclose(run(None), eager[2:], atol=1e-3)
