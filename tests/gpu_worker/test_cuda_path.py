"""The GPU code path on a CPU: padded graphs with a real decoder, and its operations as Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.model import CONFIG_8B, random_decoder
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.models.families import describe
from kernels import dispatch
from kernels import triton as operations

CPU = torch.device("cpu")
LENGTH, BLOCK, NUM_BLOCKS = 21, 16, 2
TINY = CONFIG_8B | {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(3 * LENGTH, dtype=torch.int32).view(3, LENGTH) * 7 % TINY["vocab_size"]


def step_inputs(tokens: Tensor, start: int) -> ForwardInputs:
    """Return inputs that continue the sequence of each row at position `start` and sample one token."""
    batch_size, count = tokens.shape
    positions = torch.arange(start, start + count, dtype=torch.int32)
    tables = torch.arange(batch_size * NUM_BLOCKS, dtype=torch.int32).flip(0).view(batch_size, NUM_BLOCKS)
    starts = torch.arange(batch_size + 1, dtype=torch.int32) * count
    return ForwardInputs(
        token_ids=tokens.flatten(),
        positions=positions.repeat(batch_size),
        slot_mapping=(tables[:, positions // BLOCK] * BLOCK + positions % BLOCK).flatten(),
        query_starts=starts,
        context_lens=torch.full((batch_size,), start + count, dtype=torch.int32),
        block_tables=tables,
        sampled=starts[1:] - 1,
    )


def replays(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


def test_triton_kernels_under_the_decoder_give_the_references_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    prompts, following = step_inputs(TOKENS[:, :-1], 0), step_inputs(TOKENS[:, -1:], LENGTH - 1)
    decoder.use_cache(KvCache(describe(TINY), 6, BLOCK, torch.float32, CPU))
    expected = decoder.forward(prompts), decoder.forward(following)
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    graphs = GraphDecoder(
        decoder, CPU, max_batch_size=4, max_num_tokens=64, max_blocks=3, make_recorder=lambda: replays
    )
    graphs.use_cache(KvCache(describe(TINY), 6, BLOCK, torch.float32, CPU))
    graphs.capture()
    torch.testing.assert_close(graphs.forward(prompts), expected[0], rtol=1e-4, atol=1e-5)
    # Three rows run in a graph for four rows.
    torch.testing.assert_close(graphs.forward(following), expected[1], rtol=1e-4, atol=1e-5)
