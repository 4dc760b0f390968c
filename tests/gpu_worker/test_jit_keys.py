"""No kernel is compiled while serving: random steps need only kernels that the warm-up has compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.model import TINY, random_decoder, random_runner
from gpu_worker.lora.adapter import zero_adapter
from tests.gpu_worker.launch_keys import BLOCKS_EACH, MOST_TOKENS, NUM_ROWS, new_keys, trace

CPU = torch.device("cpu")


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_warm_up_compiles_every_kernel_that_random_steps_need(
    monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool
) -> None:
    """Without graphs, every number of tokens and of sequences is launched as it is, as steps are that no graph fits."""
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
