"""The numbers of which something is demanded: an 8B-shaped model's steps beside the ceilings of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

import kernels
from benchmarks.gpu.kernel_times import measure_attention, measure_linear, measure_others
from benchmarks.gpu.model import (
    CONFIG_8B,
    TOKENS_PER_BLOCK,
    kv_bytes,
    prefill_operations,
    random_decoder,
    random_runner,
    step_inputs,
    weight_bytes,
)
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import Ceilings, copy_bandwidth, matmul_rate, seconds
from gpu_worker.batch.step import NewSequence, Step
from gpu_worker.cuda_graphs import GraphDecoder, GraphRecorder
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.models.families import describe

CUDA = torch.device("cuda")
CONTEXT, BATCH = 1024, 64
PREFILL_BATCH, PREFILL_LENGTH = 8, 2048
GAP_STEPS = 60
LEAST_DECODE_1, LEAST_DECODE_64, LEAST_PREFILL, MOST_GAP = 0.80, 0.70, 0.55, 0.03


@dataclass(slots=True)
class _Measured:
    """What later parts need of earlier ones."""

    report: Report
    ceilings: Ceilings = field(default_factory=Ceilings)
    decoder: TorchDecoder | None = None

    def model(self) -> TorchDecoder:
        if self.decoder is None:
            self.decoder = random_decoder(CONFIG_8B, CUDA, torch.bfloat16)
        return self.decoder


def measurements(report: Report) -> dict[str, Callable[[], None]]:
    """All measurements in order."""
    from benchmarks.gpu.against_transformers import compare

    report.note("kernels", kernels.describe(CUDA))
    shared = _Measured(report)
    return {
        "ceilings": lambda: _measure_ceilings(shared),
        "8B decode": lambda: _measure_decode(shared),
        "8B prefill": lambda: _measure_prefill(shared),
        "8B decode gap": lambda: _measure_gap(shared),
        "transformers": lambda: compare(report, shared.model()),
        "attention kernels": lambda: measure_attention(report, shared.ceilings),
        "linear kernels": lambda: measure_linear(report, shared.ceilings),
        "other kernels": lambda: measure_others(report),
    }


def _measure_ceilings(shared: _Measured) -> None:
    shared.ceilings.bandwidth = copy_bandwidth()
    shared.ceilings.matmul = matmul_rate()
    shared.report.note("copy bandwidth", f"{shared.ceilings.bandwidth / 1e12:.2f} TB/s")
    shared.report.note("matrix-product rate, bf16", f"{shared.ceilings.matmul / 1e12:.0f} TFLOP/s")


def _graphs(decoder: TorchDecoder, batch_size: int, context: int) -> GraphDecoder:
    """The decoder over a pool for exactly this batch, with its graphs recorded."""
    num_blocks = -(-context // TOKENS_PER_BLOCK)
    graphs = GraphDecoder(
        decoder,
        CUDA,
        max_batch_size=batch_size,
        max_num_tokens=batch_size * context,
        max_blocks=num_blocks,
        make_recorder=GraphRecorder,
    )
    pool = KvCache(describe(CONFIG_8B), batch_size * num_blocks, TOKENS_PER_BLOCK, torch.bfloat16, CUDA)
    pool.keys.normal_()
    pool.values.normal_()
    graphs.use_cache(pool)
    return graphs


def _measure_decode(shared: _Measured) -> None:
    description = describe(CONFIG_8B)
    weights, keys_and_values = weight_bytes(description, 2), kv_bytes(description, BATCH * CONTEXT, 2)
    for batch_size, num_bytes, least in (
        (1, weights, LEAST_DECODE_1),
        (BATCH, weights + keys_and_values, LEAST_DECODE_64),
    ):
        took = _decode_seconds(shared.model(), batch_size)
        shared.report.at_least(
            f"8B decode, batch {batch_size}, context {CONTEXT}, of the memory limit",
            num_bytes / shared.ceilings.bandwidth / took,
            least,
            f" ({took * 1e3:.2f} ms)",
        )
        torch.cuda.empty_cache()


def _decode_seconds(decoder: TorchDecoder, batch_size: int) -> float:
    graphs = _graphs(decoder, batch_size, CONTEXT)
    graphs.capture()
    inputs = step_inputs(batch_size, 1, CONTEXT, CONFIG_8B["vocab_size"])
    return seconds(lambda: graphs.forward(inputs))


@torch.inference_mode()
def _measure_prefill(shared: _Measured) -> None:
    description = describe(CONFIG_8B)
    graphs = _graphs(shared.model(), PREFILL_BATCH, PREFILL_LENGTH)
    inputs = step_inputs(PREFILL_BATCH, PREFILL_LENGTH, PREFILL_LENGTH, description.vocab_size)
    took = seconds(lambda: graphs.forward(inputs), repeats=5)
    operations_done = prefill_operations(description, PREFILL_BATCH, PREFILL_LENGTH)
    shared.report.at_least(
        f"8B prefill, {PREFILL_BATCH} × {PREFILL_LENGTH}, of the matrix-product rate",
        operations_done / shared.ceilings.matmul / took,
        LEAST_PREFILL,
        f" ({took * 1e3:.0f} ms)",
    )


def _measure_gap(shared: _Measured) -> None:
    """Steps of the worker's runner: what passes between steps beyond the device's own time for one."""
    num_tokens = CONTEXT + 2 * GAP_STEPS
    num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
    runner = random_runner(
        CONFIG_8B,
        shared.model(),
        CUDA,
        max_batch_size=BATCH,
        max_kv_tokens=BATCH * num_blocks * TOKENS_PER_BLOCK,
        max_sequence_length=num_tokens,
    )
    generator = np.random.default_rng(0)
    rows = np.arange(BATCH, dtype=np.int32)
    sequences = tuple(
        NewSequence(
            row=int(row),
            token_ids=generator.integers(0, CONFIG_8B["vocab_size"], CONTEXT).astype(np.int32),
            num_prompt_tokens=CONTEXT,
            block_ids=np.arange(num_blocks, dtype=np.int32) + row * num_blocks,
        )
        for row in rows
    )
    for i, sequence in enumerate(sequences):
        row, length = np.array([i], dtype=np.int32), np.array([CONTEXT], dtype=np.int32)
        start = np.zeros(1, dtype=np.int32)
        runner.run_step(Step(new_sequences=(sequence,), context_rows=row, context_starts=start, context_lengths=length))
    runner.run_step(Step(generation_rows=rows))
    # As the worker does: the next step is launched, then the result of the last is taken.
    launched, walls = runner.launch(Step(repeat_generation=True)), []
    for _ in range(GAP_STEPS):
        started = time.perf_counter()
        following = runner.launch(Step(repeat_generation=True))
        runner.finish(launched)
        launched = following
        walls.append(time.perf_counter() - started)
    runner.finish(launched)
    # The same graph over the same tables, replayed back to back without the host between.
    inputs = step_inputs(BATCH, 1, CONTEXT + GAP_STEPS, CONFIG_8B["vocab_size"])
    device_s = seconds(lambda: runner.model.decoder.forward(inputs).argmax(dim=1))
    wall_s = statistics.median(walls)
    shared.report.at_most(
        f"8B decode, batch {BATCH}, between steps, of a step",
        max(0.0, wall_s - device_s) / wall_s,
        MOST_GAP,
        f" ({wall_s * 1e3:.2f} ms a step, {device_s * 1e3:.2f} ms on the device)",
    )
