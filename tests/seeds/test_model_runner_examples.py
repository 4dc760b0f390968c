"""The documentation of the model runner: its listings compute the same sums as our code.

The other listings cannot run unmodified: they need CUDA and NCCL, or send pickles through shared memory, which this
project never does. Their closest equivalents have their own tests: CUDA graphs in tests/gpu_worker/test_cuda_graphs.py,
commands to ranks through shared memory in tests/gpu_worker/test_parallel_frames.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpu_worker.cuda_graphs import graph_sizes
from gpu_worker.kv.cache import block_bytes
from gpu_worker.models.families import describe
from tests.seeds.listings import run

BLOCK_BYTES = """
num_kv_heads = hf_config.num_key_value_heads // self.world_size
head_dim = getattr(hf_config, "head_dim", hf_config.hidden_size // hf_config.num_attention_heads)
block_bytes = 2 * hf_config.num_hidden_layers * self.block_size * num_kv_heads * head_dim * hf_config.torch_dtype.itemsize
"""  # noqa: E501

GRAPH_SIZES = """
self.graph_bs = [1, 2, 4, 8] + list(range(16, max_bs + 1, 16))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_kv_block(dtype: torch.dtype) -> None:
    config = {
        "model_type": "qwen3", "vocab_size": 331, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    }  # fmt: skip
    runner = SimpleNamespace(world_size=1, block_size=16)
    listed = run(BLOCK_BYTES, hf_config=SimpleNamespace(**config, torch_dtype=dtype), self=runner)
    assert block_bytes(describe(config), 16, dtype) == listed["block_bytes"] == 2 * 3 * 16 * 2 * 32 * dtype.itemsize


@pytest.mark.parametrize("max_bs", [16, 64, 256])
def test_batch_sizes_of_graphs(max_bs: int) -> None:
    runner = SimpleNamespace()
    run(GRAPH_SIZES, self=runner, max_bs=max_bs)
    assert graph_sizes(max_bs) == runner.graph_bs
