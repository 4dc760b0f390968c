"""Compare the worker with transformers' continuous batching: same shape, prompts and output lengths, greedy.

Our side is the worker's runner with a minimal scheduler: a waiting sequence starts as soon as a row is free, prompts
run in chunks together with the decode rows, and a sequence ends when all its tokens are generated.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.model import CONFIG_8B, TOKENS_PER_BLOCK, random_decoder, random_runner
from benchmarks.gpu.report import Report
from gpu_worker.batch.step import NewSequence, Step

if TYPE_CHECKING:
    from gpu_worker.model_runner import Launched, ModelRunner

LEAST_TIMES = 3.5
NUM_REQUESTS = 192
MAX_BATCH, MAX_TOKENS = 128, 2048
NUM_IN_FLIGHT = 2
# Minimum time left to start transformers; at the time limit, the tokens generated so far count.
LEAST_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """The token ids of a prompt, and the number of tokens to generate."""

    prompt: list[int]
    num_tokens: int


def mixed_workload(
    num_requests: int, vocab_size: int, *, longest_prompt: int = 1024, longest: int = 256
) -> list[Request]:
    """Return prompts and output lengths, both log-uniformly distributed."""
    generator = np.random.default_rng(0)
    prompts = np.exp(generator.uniform(np.log(16), np.log(longest_prompt), num_requests)).astype(int)
    lengths = np.exp(generator.uniform(np.log(16), np.log(longest), num_requests)).astype(int)
    return [
        Request(generator.integers(0, vocab_size, prompt).tolist(), int(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


@dataclass(slots=True)
class _Running:
    request: Request
    row: int
    num_computed: int = 0
    num_made: int = 0


def drive(runner: ModelRunner, requests: list[Request], max_batch: int, max_tokens: int) -> list[list[int]]:
    """Run all requests; return their tokens. Blocks are not shared: each row owns enough blocks for the longest
    sequence.
    """
    blocks_each = -(-max(len(r.prompt) + r.num_tokens for r in requests) // TOKENS_PER_BLOCK)
    waiting = deque(enumerate(requests))
    running: dict[int, _Running] = {}
    owners: dict[int, int] = {}
    outputs: list[list[int]] = [[] for _ in requests]
    released: list[int] = []
    in_flight: deque[tuple[Launched, list[list[int]]]] = deque()
    while waiting or running:
        new, contexts = [], []
        decoding = [row for row, one in running.items() if one.num_computed == len(one.request.prompt)]
        budget = max_tokens - len(decoding)
        free = sorted(set(range(max_batch)) - set(running))
        while waiting and free:
            index, request = waiting.popleft()
            row = free.pop(0)
            running[row], owners[row] = _Running(request, row), index
            new.append(
                NewSequence(
                    row=row,
                    token_ids=np.array(request.prompt, dtype=np.int32),
                    num_prompt_tokens=len(request.prompt),
                    block_ids=np.arange(blocks_each, dtype=np.int32) + row * blocks_each,
                )
            )
        for row, one in running.items():
            left = min(budget, len(one.request.prompt) - one.num_computed)
            if left > 0:
                contexts.append((row, one.num_computed, left))
                budget -= left
        columns = np.array(contexts, dtype=np.int32).reshape(-1, 3).T
        step = Step(
            released_rows=np.array(released, dtype=np.int32),
            new_sequences=tuple(new),
            context_rows=columns[0],
            context_starts=columns[1],
            context_lengths=columns[2],
            generation_rows=np.array(sorted(decoding), dtype=np.int32),
        )
        for row, _, length in contexts:
            running[row].num_computed += length
        sampled = [row for row, _, _ in contexts if running[row].num_computed == len(running[row].request.prompt)]
        sampled += sorted(decoding)
        # Planning does not need the tokens, so the next step is ready before the tokens of this step are known.
        in_flight.append((runner.launch(step), [outputs[owners[row]] for row in sampled]))
        if len(in_flight) == NUM_IN_FLIGHT:
            _take_oldest(runner, in_flight)
        released = []
        for row in sampled:
            one = running[row]
            one.num_made += 1
            if one.num_made == one.request.num_tokens:
                released.append(row)
                del running[row]
    while in_flight:
        _take_oldest(runner, in_flight)
    return outputs


def _take_oldest(runner: ModelRunner, in_flight: deque[tuple[Launched, list[list[int]]]]) -> None:
    launched, outputs = in_flight.popleft()
    for output, token in zip(outputs, runner.finish(launched).token_ids.tolist(), strict=True):
        output.append(token)


def compare(report: Report) -> None:
    """Add the token rates of the worker and of transformers' continuous batching, and their ratio."""
    decoder = random_decoder(CONFIG_8B, torch.device("cuda"), torch.bfloat16)
    requests = mixed_workload(NUM_REQUESTS, CONFIG_8B["vocab_size"])
    longest = max(len(r.prompt) + r.num_tokens for r in requests)
    blocks_each = -(-longest // TOKENS_PER_BLOCK)
    runner = random_runner(
        CONFIG_8B,
        decoder,
        torch.device("cuda"),
        max_batch_size=MAX_BATCH,
        max_num_tokens=MAX_TOKENS,
        max_sequence_length=blocks_each * TOKENS_PER_BLOCK,
        max_kv_tokens=MAX_BATCH * blocks_each * TOKENS_PER_BLOCK,
    )
    started = time.perf_counter()
    outputs = drive(runner, requests, MAX_BATCH, MAX_TOKENS)
    ours = sum(map(len, outputs)) / (time.perf_counter() - started)
    report.note(f"worker, mixed workload of {NUM_REQUESTS}, batch ≤ {MAX_BATCH}", f"{ours:.0f} output tok/s")
    del runner, decoder
    gc.collect()
    torch.cuda.empty_cache()
    if report.seconds_left < LEAST_S:
        report.failed("transformers' continuous batching", "no time left")
        return
    theirs = _transformers_speed(report, requests)
    report.note("transformers' continuous batching, the same workload", f"{theirs:.0f} output tok/s")
    report.times("output token rate relative to transformers' continuous batching", ours / theirs, LEAST_TIMES)


def _transformers_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{name: value for name, value in CONFIG_8B.items() if name != "model_type"})
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def measure_generate(report: Report) -> None:
    """Measure greedy decode steps of the worker relative to transformers' plain `generate`."""
    _measure_generate(report, "transformers' generate", {})


def measure_compiled_generate(report: Report) -> None:
    """Measure greedy decode steps relative to `generate` with a static cache, for which it compiles the decode step and
    captures it as a graph.
    """
    _measure_generate(report, "transformers' generate, compiled", {"cache_implementation": "static"})


def _measure_generate(report: Report, name: str, settings: dict[str, Any]) -> None:
    model = _transformers_model()
    for batch_size in (1, 64):
        if report.seconds_left < LEAST_S / 4:
            report.failed(f"{name}, batch {batch_size}", "no time left")
            continue
        ids = torch.randint(CONFIG_8B["vocab_size"], (batch_size, 1024), device="cuda")
        settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        times = []
        # The first run compiles; the long and the short run after it differ only in decode steps.
        for num_tokens in (8, 8, 40):
            started = time.perf_counter()
            model.generate(ids, min_new_tokens=num_tokens, max_new_tokens=num_tokens, **settings)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        took = (times[2] - times[1]) / 32
        ours = report.figures.get(f"decode {batch_size}", float("nan"))
        report.note(f"{name}, batch {batch_size}", f"{took * 1e3:.2f} ms a step, {took / ours:.1f}× the worker's")


def _transformers_speed(report: Report, requests: list[Request]) -> float:
    """Return the output tokens per second; requests are added with their own limits and collected as they finish."""
    from transformers import GenerationConfig

    model = _transformers_model()
    # There is no end token: random weights must not end a sequence before its limit.
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    manager = model.init_continuous_batching(generation_config=generation)
    manager.start()
    try:
        # Warm up: the first request allocates memory, captures graphs and compiles kernels.
        manager.add_request(requests[0].prompt, max_new_tokens=4)
        while manager.get_result(timeout=1.0) is None:
            if report.seconds_left < 0 or not manager.is_running():
                raise TimeoutError("transformers returned no token in time")
        started, num_tokens, num_done = time.perf_counter(), 0, 0
        for request in requests:
            manager.add_request(request.prompt, max_new_tokens=request.num_tokens)
        while num_done < len(requests) and report.seconds_left > 0 and manager.is_running():
            result = manager.get_result(timeout=1.0)
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            if result is not None and result.is_finished():
                num_done += 1
                num_tokens += len(result.generated_tokens)
        took = time.perf_counter() - started
    finally:
        manager.stop(block=True, timeout=10.0)
    if num_done < len(requests):
        report.note("transformers' requests done when time was up", f"{num_done} of {len(requests)}")
    return num_tokens / took
