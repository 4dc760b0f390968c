"""Time the worker's steps in process, without scheduler or sockets: `python -m benchmarks.worker_steps`.

For each batch size it prefills that many prompts and then decodes. It prints the duration of a step, and the CPU time
of the step outside the model's forward pass (rows, tensors, sampling).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.forward_time import ForwardTime
from gpu_worker.batch.step import EMPTY, NewSequence, SamplingParams, Step
from gpu_worker.model_runner import ModelRunner
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder

PROMPT_TOKENS, DECODE_STEPS = 64, 32
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
}


def measure(
    runner: ModelRunner, timed: ForwardTime, batch_size: int, sampling: SamplingParams
) -> tuple[float, float, float]:
    """Return the prefill tokens/s, and the median times of a decode step and of its part outside the forward pass, in
    ms.
    """
    runner.clear()
    num_blocks = -(-(PROMPT_TOKENS + DECODE_STEPS + 2) // 16)
    rows = np.arange(batch_size, dtype=np.int32)
    generator = np.random.default_rng(batch_size)
    vocab_size = runner.model.description.vocab_size
    sequences = tuple(
        NewSequence(
            row=int(row),
            token_ids=generator.integers(300, vocab_size, PROMPT_TOKENS).astype(np.int32),
            num_prompt_tokens=PROMPT_TOKENS,
            block_ids=np.arange(num_blocks, dtype=np.int32) + row * num_blocks,
            sampling=sampling,
        )
        for row in rows
    )
    started = time.perf_counter()
    for begin in range(0, batch_size, 4):
        some = rows[begin : begin + 4]
        new = sequences if begin == 0 else ()
        lengths = np.full_like(some, PROMPT_TOKENS)
        runner.run_step(Step(new_sequences=new, context_rows=some, context_starts=0 * some, context_lengths=lengths))
    prefill = batch_size * PROMPT_TOKENS / (time.perf_counter() - started)
    runner.run_step(Step(generation_rows=rows, released_rows=EMPTY))
    totals, outside = [], []
    for _ in range(DECODE_STEPS):
        before, started, cpu_started = timed.seconds, time.perf_counter(), time.thread_time()
        runner.run_step(Step(repeat_generation=True))
        totals.append(time.perf_counter() - started)
        outside.append(time.thread_time() - cpu_started - (timed.seconds - before))
    return prefill, 1000 * float(np.median(totals)), 1000 * float(np.median(outside))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    config = WorkerConfig(
        model=arguments.model,
        kernels=arguments.kernels,
        weights=arguments.weights,
        kv=arguments.kv,
        max_kv_tokens=32768,
        num_threads=arguments.num_threads,
    )
    runner = ModelRunner(config, open_model_folder(config.model))
    timed = ForwardTime(runner)
    print(f"{'sampling':22}{'rows':>5}{'prefill tok/s':>15}{'ms a step':>11}{'outside ms':>12}{'tok/s':>9}")
    for kind in arguments.kinds:
        for batch_size in arguments.batch_sizes:
            prefill, total, outside = measure(runner, timed, batch_size, KINDS[kind])
            speed = 1000 * batch_size / total
            print(f"{kind:22}{batch_size:5}{prefill:15.0f}{total:11.2f}{outside:12.3f}{speed:9.0f}", flush=True)


if __name__ == "__main__":
    main()
