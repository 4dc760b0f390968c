"""No kernel is compiled while serving: random steps need only kernels that the warm-up has compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.model import TINY, random_decoder, random_runner
from gpu_worker.lora.adapter import zero_adapter
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.models.families import describe
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from kernels import triton as operations
from midstream.model.folder import open_model_folder
from tests.gpu_worker.launch_keys import BLOCKS_EACH, MOST_TOKENS, NUM_ROWS, VOCAB_SIZE, new_keys, trace
from tests.gpu_worker.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_warm_up_compiles_every_kernel_that_random_steps_need(
    monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool
) -> None:
    """Without graphs, steps are launched with their exact numbers of tokens and sequences, as are steps that fit no
    graph.
    """
    keys = trace(monkeypatch)
    runner = random_runner(
        TINY,
        random_decoder(TINY, CPU, torch.float32),
        CPU,
        runs_ahead=True,
        max_batch_size=NUM_ROWS,
        max_num_tokens=MOST_TOKENS,
        max_kv_tokens=NUM_ROWS * BLOCKS_EACH * 16,
        max_sequence_length=BLOCKS_EACH * 16,
        num_threads=1,
        adapter_bytes=1 << 20,
        cuda_graphs=cuda_graphs,
    )
    # These are two norms, rotary embedding, KV write, activation and sampling; attention for prompts and for single
    # queries, split and combined; and two kernels for LoRA.
    assert len(keys.seen) >= 11
    assert new_keys(keys, runner, 150, runner.adapters.add(zero_adapter(runner.model.description))) == []


def test_the_warm_up_compiles_the_kernels_for_adapters_of_experts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Adapters of other layers do not change the kernels of the experts."""
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    make_tiny_model(tmp_path, "Qwen3Moe", vocab_size=VOCAB_SIZE, num_hidden_layers=1, head_dim=16, **experts)
    keys, folder = trace(monkeypatch), open_model_folder(str(tmp_path))
    description = describe(folder.config)
    decoder = TorchDecoder(description, DecoderWeights(folder, description, "f32"), torch.float32, CPU)
    runner = random_runner(
        folder.config,
        decoder,
        CPU,
        runs_ahead=True,
        max_batch_size=NUM_ROWS,
        max_num_tokens=MOST_TOKENS,
        max_kv_tokens=NUM_ROWS * BLOCKS_EACH * 16,
        max_sequence_length=BLOCKS_EACH * 16,
        num_threads=1,
        adapter_bytes=1 << 20,
        cuda_graphs=False,
    )
    assert new_keys(keys, runner, 60, runner.adapters.add(zero_adapter(description, of_experts=True))) == []


def test_keys_do_not_depend_on_numbers_of_rows_or_on_places_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles separately for integers that are 1 or multiples of 16, and for aligned pointers."""
    keys = trace(monkeypatch)
    keys_cache, values_cache = torch.zeros(2, 8, 16, 2, 16).unbind()
    weight, norm, angles = torch.zeros(96, 64), torch.ones(64), torch.zeros(48, 8)
    arena, table = torch.zeros(4096), torch.zeros(4, 2, dtype=torch.int64)
    for place, num_rows in ((0, 1), (1, 2), (2, 16), (3, 17), (4, 48)):
        # As in the inputs of a graph, arrays start at arbitrary offsets in one buffer.
        numbers = torch.zeros(10 * num_rows + place, dtype=torch.int32)[place:]
        slots, starts, lens = numbers[:num_rows], numbers[num_rows : 2 * num_rows + 1], numbers[-num_rows:]
        tables = numbers[2 * num_rows : 6 * num_rows].view(num_rows, 4)
        heads, x = torch.zeros(num_rows, 8, 16), torch.zeros(num_rows, 64)
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        for most, splits in ((1, None), (2, 2)):
            operations.paged_attention(
                q,
                keys_cache,
                values_cache,
                tables,
                starts,
                lens,
                1.0,
                max_queries=most,
                num_shares=3,
                num_tile_splits=splits,
            )
        operations.rms_norm(x, norm, 1e-5)
        operations.activate(x, "silu")
        operations.gated_linear(x[:16], weight, "silu", is_batch_invariant=True)
        cos = sin = angles[:num_rows]
        operations.rotate_and_store(q, k, v, cos, sin, keys_cache, values_cache, slots)
        operations.add_lora(torch.zeros(num_rows, 96), x, arena, table, slots, 8)
    names = [name for name, _ in keys.seen]
    # Attention for prompts, the combination of its splits, and attention for single queries; then the other operations,
    # in the order above.
    attention = ["attend", "combine", "decode"]
    others = ["_norm", "_activate", "_linear", "_rotate_and_store", "_shrink", "_expand"]
    assert sorted(names) == sorted(attention + others)
