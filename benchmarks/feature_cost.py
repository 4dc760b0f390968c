"""Measure the cost of feature code in a batch that uses no features: `python -m benchmarks.feature_cost`.

Greedy decode steps run alternately with and without feature code: adapters, drafts, grammars, post-processors, logits
processors, reports, beams, failed rows. The CPU time outside the forward pass reveals differences that are lost in the
noise of whole steps; both are printed as ratios to a whole step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.forward_time import ForwardTime
from gpu_worker.batch.input_batch import InputBatch
from gpu_worker.batch.step import EMPTY, GREEDY, NewSequence, Step, StepOutput
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.sampling.sampler import _likeliest
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder

PROMPT_TOKENS, NUM_PAIRS = 32, 100
REPEAT = Step(repeat_generation=True)


@torch.inference_mode()
def bare_step(runner: ModelRunner, batch: InputBatch) -> StepOutput:
    """Run a decode step without features, but with the checks that every step needs."""
    started = time.perf_counter()
    runner._settle_all_but(1)
    rows = batch._next_generation(REPEAT)
    last = batch.rows.lengths[rows] - 1
    starts = np.arange(len(rows) + 1, dtype=np.int32)
    slots = batch.rows.block_tables[rows, last // 16] * 16 + last % 16
    most_blocks = -(-int(last.max() + 1) // 16)
    inputs = ForwardInputs(
        token_ids=torch.from_numpy(batch.rows.tokens[rows, last]),
        positions=torch.from_numpy(last),
        slot_mapping=torch.from_numpy(slots),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(last + 1),
        block_tables=torch.from_numpy(batch.rows.block_tables[rows, :most_blocks]),
        sampled=torch.from_numpy(starts[:-1]),
    )
    if (last + 1 > batch.rows.num_blocks[rows] * 16).any():
        raise ValueError("a block table is too short for its sequence's tokens")
    token_ids, highest = _likeliest(runner.model.decoder.forward(inputs))
    if not np.isfinite(highest).all():
        raise ValueError("a logit is not finite")
    batch.rows.append_tokens(rows, token_ids)
    return StepOutput(token_ids, (), (), time.perf_counter() - started)


def start(runner: ModelRunner, batch_size: int) -> None:
    """Clear the runner, prefill `batch_size` prompts and decode one token each."""
    runner.clear()
    length = PROMPT_TOKENS + 2 * NUM_PAIRS + 4
    num_blocks = -(-length // 16)
    generator = np.random.default_rng(batch_size)
    for row in range(batch_size):
        sequence = NewSequence(
            row=row,
            token_ids=generator.integers(300, 40_000, PROMPT_TOKENS).astype(np.int32),
            num_prompt_tokens=PROMPT_TOKENS,
            block_ids=np.arange(num_blocks, dtype=np.int32) + row * num_blocks,
            sampling=GREEDY,
        )
        place, none, count = (np.array([value], dtype=np.int32) for value in (row, 0, PROMPT_TOKENS))
        runner.run_step(Step(new_sequences=(sequence,), context_rows=place, context_starts=none, context_lengths=count))
    runner.run_step(Step(generation_rows=np.arange(batch_size, dtype=np.int32), released_rows=EMPTY))


def measure(runner: ModelRunner, timed: ForwardTime, batch_size: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step without feature code, the ratio of a step with feature code to it, and this
    ratio computed from the CPU time that feature code adds outside the forward pass.
    """
    start(runner, batch_size)
    batch = runner._batch
    kinds: dict[bool, Callable[[], object]] = {
        True: lambda: runner.run_step(REPEAT),
        False: lambda: bare_step(runner, batch),
    }
    walls: dict[bool, list[float]] = {True: [], False: []}
    outside: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * NUM_PAIRS):
        is_whole = number % 4 in (0, 3)  # alternate the order
        before, started, cpu_started = timed.seconds, time.perf_counter(), time.thread_time()
        kinds[is_whole]()
        walls[is_whole].append(time.perf_counter() - started)
        outside[is_whole].append(time.thread_time() - cpu_started - (timed.seconds - before))
    step = statistics.median(walls[False])
    added = statistics.median(outside[True]) - statistics.median(outside[False])
    return 1000 * step, statistics.median(walls[True]) / step, 1 + added / step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    arguments = parser.parse_args()
    config = WorkerConfig(model=arguments.model, max_kv_tokens=32_768, num_threads=arguments.num_threads)
    runner = ModelRunner(config, open_model_folder(config.model))
    timed = ForwardTime(runner)
    print(f"{'rows':>5}{'ms a step':>11}{'of whole steps':>16}{'by processor time':>19}")
    for batch_size in arguments.batch_sizes:
        step, by_wall, by_processor = measure(runner, timed, batch_size)
        print(f"{batch_size:5}{step:11.2f}{by_wall:16.3f}{by_processor:19.4f}", flush=True)


if __name__ == "__main__":
    main()
