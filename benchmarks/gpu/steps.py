"""Steps of the worker's runner with an 8B-shaped model of random weights, each compared with the limits of the device.

Without a GPU everything runs at tiny sizes, only to test that it runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.model import (
    CONFIG_1B,
    CONFIG_8B,
    CONFIG_MIXTURE,
    TINY,
    TINY_MIXTURE,
    TOKENS_PER_BLOCK,
    kv_bytes,
    prefill_operations,
    random_decoder,
    random_runner,
    step_inputs,
    weight_bytes,
)
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import seconds
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import GREEDY, IntArray, NewSequence, SamplingParams, Step
from gpu_worker.cuda_graphs import GraphDecoder, recorder_for
from gpu_worker.features import Feature
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter, LoraPair, expert_shapes, module_shapes
from gpu_worker.lora.inputs import AdapterTokens
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.models.description import DecoderDescription
from gpu_worker.models.families import describe
from gpu_worker.sampling.guided import Constraints, Guides
from gpu_worker.speculation.drafts import Drafter

LEAST_DECODE = {1: 0.85, 256: 0.80}
MOST_SAMPLED, LEAST_MIXED, LEAST_PREFILL, MOST_GAP = 0.03, 0.9, 0.60, 0.03
_SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "penalties": SamplingParams(top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "log probabilities": SamplingParams(temperature=0.0, log_probs=5),
}
_PROMPT = 64
# Number of sequences for which the graphs of long contexts have room, and number of drafts per row.
_LONG_ROWS, _NUM_DRAFTS = 8, 4
# Number of kernels in a profile.
_MOST_KERNELS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the steps.

    Attributes:
        batches: Numbers of sequences in decode steps.
        context: Context tokens of each sequence.
        long_context, query: Tokens in the cache, and tokens that follow them in one step.
        draft_config: A smaller model that proposes drafts.
        mixture_config: A model with experts.
        prefills: (sequences, tokens of each).
    """

    config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    long_context: int
    query: int
    prefills: tuple[tuple[int, int], ...]
    num_steps: int
    draft_config: dict[str, Any]
    mixture_config: dict[str, Any]

    @property
    def description(self) -> DecoderDescription:
        return describe(self.config)


def sizes() -> Sizes:
    """Return the sizes for an 8B model on a GPU, and tiny sizes elsewhere."""
    if torch.cuda.is_available():
        cuda = torch.device("cuda:0")
        prefills = ((1, 1024), (8, 1024), (1, 8192))
        others = CONFIG_1B, CONFIG_MIXTURE
        return Sizes(CONFIG_8B, cuda, torch.bfloat16, (1, 8, 64, 256), 1024, 16000, 50, prefills, 40, *others)
    return Sizes(TINY, torch.device("cpu"), torch.float32, (1, 3), 40, 100, 5, ((2, 20),), 3, TINY, TINY_MIXTURE)


def settings_of(size: Sizes, batch_size: int, tokens_each: int) -> dict[str, Any]:
    """Return the settings of a worker for sequences of `tokens_each` tokens."""
    length = -(-tokens_each // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK
    settings: dict[str, Any] = {
        "max_batch_size": batch_size,
        "max_kv_tokens": batch_size * length,
        "max_sequence_length": length,
    }
    # Tiny operations take longer in several threads.
    return settings | {"num_threads": 1} if size.device.type == "cpu" else settings


class Bench:
    """A runner with a model of random weights, and the functions that run its steps."""

    def __init__(self, size: Sizes, batch_size: int, tokens_each: int, runner: ModelRunner | None = None) -> None:
        """Use `runner`, which has the settings of `settings_of`; if it is None, create one."""
        self.size = size
        self.blocks_each = -(-tokens_each // TOKENS_PER_BLOCK)
        self.runner = runner or random_runner(
            size.config,
            random_decoder(size.config, size.device, size.dtype),
            size.device,
            size.dtype,
            runs_ahead=True,
            **settings_of(size, batch_size, tokens_each),
        )
        self._generator = np.random.default_rng(0)

    def sequence(self, row: int, num_tokens: int, sampling: SamplingParams = GREEDY) -> NewSequence:
        """Return a sequence of random tokens in blocks that belong to the row."""
        return NewSequence(
            row=row,
            token_ids=self._generator.integers(0, self.size.config["vocab_size"], num_tokens).astype(np.int32),
            num_prompt_tokens=num_tokens,
            block_ids=np.arange(self.blocks_each, dtype=np.int32) + row * self.blocks_each,
            sampling=sampling,
        )

    def start(self, num_rows: int, context: int, sampling: SamplingParams = GREEDY) -> None:
        """Fill rows with sequences, computing only the last token of each: the contents of the cache do not affect
        times.
        """
        rows = np.arange(num_rows, dtype=np.int32)
        self.runner.clear()
        self.runner.run_step(
            Step(
                new_sequences=tuple(self.sequence(row, context, sampling) for row in rows.tolist()),
                context_rows=rows,
                context_starts=np.full_like(rows, context - 1),
                context_lengths=np.ones_like(rows),
            )
        )
        self.runner.run_step(Step(generation_rows=rows))

    def step_seconds(self, steps: Iterator[Step]) -> float:
        """Run steps as the worker does, launching each before the previous one is finished; return their median
        time.
        """
        runner, walls = self.runner, []
        launched = runner.launch(next(steps))
        for step in steps:
            started = time.perf_counter()
            following = runner.launch(step)
            runner.finish(launched)
            launched = following
            walls.append(time.perf_counter() - started)
        runner.finish(launched)
        return statistics.median(walls)

    def decode_seconds(self) -> float:
        """Return the median time of decode steps of the current rows, run as in `step_seconds`."""
        return self.step_seconds(Step(repeat_generation=True) for _ in range(self.size.num_steps))

    def in_turn_seconds(self) -> float:
        """Return the median time of decode steps of the current rows, each of which is finished before the next one is
        launched.
        """
        walls = []
        for _ in range(self.size.num_steps):
            started = time.perf_counter()
            self.runner.run_step(Step(repeat_generation=True))
            walls.append(time.perf_counter() - started)
        return statistics.median(walls)


def limit_s(report: Report, size: Sizes, num_tokens: int, context: int) -> float:
    """Return the time to read the KV cache of `context` tokens once and to multiply `num_tokens` rows by all matrices,
    which takes at least as long as reading the matrices; NaN if the device's rates are unknown.
    """
    bandwidth, rate = (report.figures.get(name, float("nan")) for name in ("bandwidth", "matmul"))
    weights = weight_bytes(size.description, 2)
    products = 2 * (weights // 2) * num_tokens
    return max(weights / bandwidth, products / rate) + kv_bytes(size.description, context, 2) / bandwidth


def measure_decode(report: Report) -> None:
    """Measure greedy decode at each batch size, relative to the limit of the device."""
    size = sizes()
    bench = Bench(size, max(size.batches), size.context + 2 * size.num_steps)
    for batch_size in size.batches:
        bench.start(batch_size, size.context)
        took = bench.decode_seconds()
        report.figures[f"decode {batch_size}"] = took
        detail = f" ({took * 1e3:.2f} ms, {batch_size / took:.0f} tok/s)"
        name = f"fraction of the limit: greedy decode, batch {batch_size}, context {size.context}"
        least_s = limit_s(report, size, batch_size, batch_size * (size.context + size.num_steps))
        report.share(name, least_s / took, LEAST_DECODE.get(batch_size), detail)


def measure_profile(report: Report) -> None:
    """List the kernels that take the most time of a greedy decode step, for the smallest and the largest batch."""
    size = sizes()
    bench = Bench(size, max(size.batches), size.context + 2 * size.num_steps)
    for batch_size in (min(size.batches), max(size.batches)):
        bench.start(batch_size, size.context)
        step = Step(repeat_generation=True)
        bench.runner.run_step(step)
        with torch.profiler.profile() as profile:
            bench.runner.run_step(step)
        kernels: list[tuple[float, int, str]] = []
        for item in cast("Any", profile).key_averages():
            took_us = item.self_device_time_total if size.device.type == "cuda" else item.self_cpu_time_total
            kernels.append((took_us, item.count, item.key))
        total_us = sum(took_us for took_us, _, _ in kernels) or 1.0
        for took_us, count, name in sorted(kernels, reverse=True)[:_MOST_KERNELS]:
            detail = f"{took_us:.0f} µs in {count} launches, {took_us / total_us:.0%}"
            report.note(f"profile of a step, batch {batch_size}: {name[:60]}", detail)


def measure_dependent_launch(report: Report) -> None:
    """Measure how much longer a greedy decode step of one row takes without programmatic dependent launch."""
    from kernels.triton import set_dependent_launch

    size, times = sizes(), list[float]()
    for is_on in (True, False):
        set_dependent_launch(is_on)
        bench = Bench(size, 1, size.context + 2 * size.num_steps)
        bench.start(1, size.context)
        times.append(bench.decode_seconds())
        bench.runner.close()
    name = "overhead without programmatic dependent launch: greedy decode, batch 1"
    report.surplus(name, times[1] / times[0] - 1, None, _ms(times[1]))


class RandomMasks:
    """A stand-in for the grammar process, which would need a tokenizer: a random mask for each row with a grammar."""

    def __init__(self, rows: Rows, vocab_size: int) -> None:
        self._rows = rows
        self._mask = np.random.default_rng(0).integers(1, 256, -(-vocab_size // 8)).astype(np.uint8)
        self._asked: list[int] = []

    def ask(self, sampled: IntArray, others: list[int]) -> bool:
        """Remember the sampled rows with a grammar; return whether there are any."""
        self._asked = [row for row in sampled.tolist() if self._rows.features[row] & Feature.GUIDED]
        return bool(self._asked)

    def answer(self) -> Constraints:
        """Return the masks of the rows that `ask` found."""
        return Constraints(dict.fromkeys(self._asked, self._mask))

    def close(self) -> None:
        """Do nothing."""


def measure_sampled(report: Report) -> None:
    """Measure the overhead of each kind of sampling relative to a greedy step."""
    size = sizes()
    bench = Bench(size, max(size.batches), size.context + 2 * size.num_steps)
    runner = bench.runner
    runner._guides = cast("Guides", RandomMasks(runner._rows, size.description.vocab_size))
    for batch_size in size.batches:
        bench.start(batch_size, size.context)
        greedy_s = bench.decode_seconds()
        for name, sampling in {**_SAMPLINGS, "grammar": GREEDY}.items():
            bench.start(batch_size, size.context, sampling)
            if name == "grammar":
                runner._rows.features[:batch_size] |= np.uint16(Feature.GUIDED)
            took = bench.decode_seconds()
            is_limited = name.startswith(("temperature", "top")) and batch_size in LEAST_DECODE
            report.surplus(
                f"overhead relative to greedy: {name}, batch {batch_size}",
                took / greedy_s - 1,
                MOST_SAMPLED if is_limited else None,
                _ms(took),
            )


def measure_mixed(report: Report) -> None:
    """Measure decode with a short prompt in every step, relative to decode steps without prompts."""
    size = sizes()
    num_rows = sorted(size.batches)[-2]
    prompt = min(_PROMPT, size.context)
    bench = Bench(size, num_rows + 1, size.context + 3 * size.num_steps)
    bench.start(num_rows, size.context)
    alone = bench.decode_seconds()
    rows = np.arange(num_rows, dtype=np.int32)

    def steps() -> Iterator[Step]:
        spare = np.array([num_rows], dtype=np.int32)
        for i in range(size.num_steps):
            yield Step(
                released_rows=spare[: int(i > 0)],
                new_sequences=(bench.sequence(num_rows, prompt),),
                context_rows=spare,
                context_starts=np.zeros(1, dtype=np.int32),
                context_lengths=np.full(1, prompt, dtype=np.int32),
                generation_rows=rows,
            )

    took = bench.step_seconds(steps())
    report.share(
        f"rate of decoded tokens relative to decode alone: {num_rows} decodes with a prompt of {prompt} tokens",
        alone / took,
        LEAST_MIXED,
        _ms(took),
    )


def measure_prefill(report: Report) -> None:
    """Measure whole prompts in one step, relative to the matrix-product rate."""
    size = sizes()
    decoder = random_decoder(size.config, size.device, size.dtype)
    for batch_size, length in size.prefills:
        graphs = _graphs(size, decoder, batch_size, length, is_recorded=False)
        inputs = step_inputs(batch_size, length, length, size.description.vocab_size)
        took = _seconds(size, graphs, inputs)
        done = prefill_operations(size.description, batch_size, length)
        share = done / report.figures.get("matmul", float("nan")) / took
        report.share(
            f"fraction of the matrix-product rate: prefill, {batch_size} × {length}", share, LEAST_PREFILL, _ms(took)
        )


def measure_long_context(report: Report) -> None:
    """Measure one query, four drafts to verify and a short prompt over a long cached context, relative to the limit of
    the device.
    """
    size = sizes()
    decoder = random_decoder(size.config, size.device, size.dtype)
    # The graphs of a worker have room for several sequences.
    graphs = _graphs(size, decoder, _LONG_ROWS, size.long_context, is_recorded=True)
    graphs.capture()
    for what, num_queries, num_sampled in (("1 query", 1, 1), ("4 drafts", 5, 5), ("a prompt", size.query, 1)):
        inputs = step_inputs(1, num_queries, size.long_context, size.description.vocab_size)
        sampled = torch.arange(num_queries - num_sampled, num_queries, dtype=torch.int32)
        took = _seconds(size, graphs, dataclasses.replace(inputs, sampled=sampled))
        least_s = limit_s(report, size, num_queries, size.long_context)
        name = f"fraction of the limit: {what} over {size.long_context} tokens, {num_queries} tokens in a step"
        report.share(name, least_s / took, None, _ms(took))


def measure_gap(report: Report) -> None:
    """Measure how much the time between decode steps exceeds the device's own time."""
    size = sizes()
    batch_size = sorted(size.batches)[-2]
    bench = Bench(size, batch_size, size.context + 2 * size.num_steps)
    bench.start(batch_size, size.context)
    wall_s = bench.decode_seconds()
    # Replay the same graph with the same tables back to back, without waiting for the host.
    inputs = step_inputs(batch_size, 1, size.context + size.num_steps, size.description.vocab_size)
    device_s = _run_seconds(size, lambda: bench.runner.model.decoder.forward(inputs).argmax(dim=1))
    detail = f" ({wall_s * 1e3:.2f} ms per step, {device_s * 1e3:.2f} ms on the device)"
    report.surplus(
        f"idle time between steps as a fraction of a step: decode, batch {batch_size}",
        max(0.0, 1 - device_s / wall_s),
        MOST_GAP,
        detail,
    )


def measure_lora(report: Report) -> None:
    """Measure the overhead of a decode step with 8 adapters of rank 16 relative to a step without adapters."""
    size = sizes()
    batch_size = sorted(size.batches)[-2]
    decoder = random_decoder(size.config, size.device, size.dtype)
    adapter = _adapter(size.description)
    decoder.reserve_adapters(8 * adapter.device_bytes(size.dtype.itemsize), 16)
    graphs = _graphs(size, decoder, batch_size, size.context, is_recorded=True, takes_adapters=True)
    graphs.capture()
    inputs = step_inputs(batch_size, 1, size.context, size.description.vocab_size)
    plain_s = _seconds(size, graphs, inputs)
    adapters = tuple(graphs.place_adapter(adapter) for _ in range(8))
    indices = torch.arange(batch_size, dtype=torch.int32) % 8
    tokens = AdapterTokens(tuple(map(str, range(8))), adapters, indices)
    took = _seconds(size, graphs, dataclasses.replace(inputs, adapters=tokens))
    report.surplus(
        f"overhead relative to no adapter: 8 LoRA adapters of rank 16, batch {batch_size}",
        took / plain_s - 1,
        None,
        _ms(took),
    )


def measure_expert_lora(report: Report) -> None:
    """Measure the overhead of adapters of rank 16 in a model with experts, batch 1: one without matrices for the
    experts, and one with them.
    """
    size = sizes()
    size = dataclasses.replace(size, config=size.mixture_config)
    decoder = random_decoder(size.config, size.device, size.dtype)
    adapters = {
        "without matrices for experts": _adapter(size.description),
        "with matrices for experts": _adapter(size.description, of_experts=True),
    }
    decoder.reserve_adapters(sum(one.device_bytes(size.dtype.itemsize) for one in adapters.values()), 16)
    graphs = _graphs(size, decoder, 1, size.context, is_recorded=True, takes_adapters=True)
    graphs.capture()
    inputs = step_inputs(1, 1, size.context, size.description.vocab_size)
    plain_s = _seconds(size, graphs, inputs)
    for what, adapter in adapters.items():
        tokens = AdapterTokens(("",), (graphs.place_adapter(adapter),), torch.zeros(1, dtype=torch.int32))
        took = _seconds(size, graphs, dataclasses.replace(inputs, adapters=tokens))
        name = f"overhead relative to no adapter: one LoRA adapter {what}, batch 1"
        report.surplus(name, took / plain_s - 1, None, f" ({plain_s * 1e3:.2f} + {(took - plain_s) * 1e3:.2f} ms)")


def _adapter(d: DecoderDescription, *, of_experts: bool = False) -> Adapter:
    shapes = module_shapes(d).items()
    layer = {name: LoraPair(torch.randn(16, k), torch.randn(n, 16), 1.0) for name, (k, n) in shapes}
    mixture = d.mixtures[0]
    if of_experts and mixture is not None:
        count = mixture.num_experts
        for name, (k, n) in expert_shapes(d).items():
            layer[name] = LoraPair(torch.randn(count, 16, k), torch.randn(count, n, 16), 1.0)
    return Adapter("", "", (layer,) * d.num_layers)


def measure_drafts(report: Report) -> None:
    """Measure the overhead of steps that verify four drafts per row relative to plain decode steps, and of a draft
    model without graphs.
    """
    size = sizes()
    batch_size = sorted(size.batches)[1]
    # The recorded steps of a smaller maximum batch size have no room for so many drafts.
    bench = Bench(size, max(size.batches), size.context + 8 * size.num_steps)
    bench.start(batch_size, size.context)
    plain_s = bench.decode_seconds()
    bench.start(batch_size, size.context, SamplingParams(temperature=0.0, num_draft_tokens=_NUM_DRAFTS))
    bench.runner._batch._drafter = cast("Drafter", RandomDrafts(size.description.vocab_size))
    rows = np.arange(batch_size, dtype=np.int32)
    limits = np.full_like(rows, _NUM_DRAFTS)
    took = bench.step_seconds(
        Step(generation_rows=rows, draft_rows=rows, draft_limits=limits) for _ in range(size.num_steps)
    )
    report.surplus(
        f"overhead relative to plain decode: verifying {_NUM_DRAFTS} drafts, batch {batch_size}",
        took / plain_s - 1,
        None,
        _ms(took),
    )
    bench.runner.close()
    _measure_draft_model(report, dataclasses.replace(size, config=size.draft_config))


class RandomDrafts:
    """A stand-in for the proposer of drafts. Few of its drafts are accepted, which does not affect a step's time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._generator = vocab_size, np.random.default_rng(0)

    def propose(self, step: Step) -> dict[int, IntArray]:
        """Return as many drafts as the step allows."""
        return {
            row: self._generator.integers(0, self._vocab_size, limit).astype(np.int32)
            for row, limit in zip(step.draft_rows.tolist(), step.draft_limits.tolist(), strict=True)
        }


def _measure_draft_model(report: Report, size: Sizes) -> None:
    decoder = random_decoder(size.config, size.device, size.dtype)
    inputs = step_inputs(1, 1, size.context, size.description.vocab_size)
    times = []
    for is_recorded in (True, False):
        graphs = _graphs(size, decoder, 1, size.context, is_recorded=is_recorded)
        graphs.capture()
        times.append(_seconds(size, graphs, inputs))
    billions = weight_bytes(size.description, 1) / 1e9
    name = f"overhead without graphs: one draft of a model of {billions:.1f} billion weights"
    report.surplus(name, times[1] / times[0] - 1, None, f" ({times[0] * 1e3:.2f} ms with graphs)")


def _graphs(
    size: Sizes,
    decoder: TorchDecoder,
    batch_size: int,
    context: int,
    *,
    is_recorded: bool,
    takes_adapters: bool = False,
) -> GraphDecoder:
    """Return the decoder with a pool of graphs of exactly this batch size."""
    num_blocks = -(-context // TOKENS_PER_BLOCK)
    graphs = GraphDecoder(
        decoder,
        size.device,
        max_batch_size=batch_size,
        max_num_tokens=batch_size * context,
        max_blocks=num_blocks,
        make_recorder=recorder_for(size.device) if is_recorded else None,
        takes_adapters=takes_adapters,
        adapts_experts=bool(expert_shapes(size.description)),
    )
    pool = KvCache(size.description, batch_size * num_blocks, TOKENS_PER_BLOCK, size.dtype, size.device)
    pool.keys.normal_()
    pool.values.normal_()
    graphs.use_cache(pool)
    return graphs


@torch.inference_mode()
def _seconds(size: Sizes, graphs: GraphDecoder, inputs: Any) -> float:
    return _run_seconds(size, lambda: graphs.forward(inputs))


def _run_seconds(size: Sizes, run: Callable[[], object]) -> float:
    if size.device.type == "cuda":
        return seconds(run, repeats=10)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _ms(took: float) -> str:
    return f" ({took * 1e3:.2f} ms)"


def measure_kv_pool(report: Report) -> None:
    """Check and measure the copies of KV blocks to the host and back, on which tiers and transfers depend."""
    size = sizes()
    num_blocks = 64 if size.device.type == "cuda" else 4
    kv = KvCache(size.description, 2 * num_blocks, TOKENS_PER_BLOCK, size.dtype, size.device)
    for cache in (kv.keys, kv.values):
        cache.normal_()
    kv.block_hashes[:] = np.arange(1, 2 * num_blocks + 1)
    pool, seconds_of = kv.memory, dict[str, float]()
    pool.write(0, cast("NDArray[np.uint8]", pool.read(0, 1)))  # allocates pinned memory
    started = time.perf_counter()
    contents = [cast("NDArray[np.uint8]", pool.read(block, block + 1)) for block in range(num_blocks)]
    seconds_of["to the host"] = time.perf_counter() - started
    started = time.perf_counter()
    for block, copied in enumerate(contents):
        pool.write(num_blocks + block, copied)
    if size.device.type == "cuda":
        torch.cuda.synchronize()
    seconds_of["to the device"] = time.perf_counter() - started
    is_same = [
        bool((cache[:, block] == cache[:, num_blocks + block]).all())
        for cache in (kv.keys, kv.values)
        for block in range(num_blocks)
    ]
    report.share("KV blocks unchanged by copies to the host and back", statistics.mean(is_same), 1.0)
    for name, took in seconds_of.items():
        report.note(f"KV blocks copied {name}", f"{num_blocks * len(contents[0]) / took / 1e9:.2f} GB/s")
