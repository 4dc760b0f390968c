"""Print the Triton kernels that random steps would compile after a warm-up: `python -m tests.gpu_worker.jit_keys`.

Kernels are not run: each launch is recorded with the key under which Triton caches compiled code (types, pointer
alignment, integers that are 1 or multiples of 16, constants), and PyTorch's operations compute the results. The program
runs as a separate process because Triton must not be in interpreter mode.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"

import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.compiled import NoDevice
from benchmarks.gpu.model import TINY, random_decoder, random_runner
from gpu_worker import limits
from gpu_worker.batch.step import AdapterRef, NewSequence, SamplingParams, Step
from gpu_worker.lora.adapter import zero_adapter
from gpu_worker.model_runner import ModelRunner
from kernels import dispatch
from kernels import triton as operations
from kernels.triton import attention

CPU = torch.device("cpu")
NUM_ROWS, BLOCKS_EACH, MOST_TOKENS = 6, 8, 32
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(temperature=0.5, top_k=7, top_p=0.8),
    SamplingParams(temperature=0.0, log_probs=2),
    SamplingParams(min_p=0.1, presence_penalty=0.5),
)


class Keys:
    """The keys of all launches, each with the kernel's name."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self._binders: dict[int, Callable[..., Any]] = {}

    def launch(self, function: JITFunction) -> Callable[..., object]:
        """Return a function that records the launches of `function`."""

        def record(*args: object, **kwargs: object) -> None:
            binder = self._binders.setdefault(id(function), function.create_binder()[-1])
            _, specialization, options = binder(*args, debug=False, **kwargs)
            self.seen.add((function.__name__, f"{specialization} {options}"))

        return record


def with_results(name: str) -> Callable[..., Any]:
    """Record the launch of the Triton operation, and return the result of the PyTorch operation."""
    reference = getattr(dispatch, f"torch_{name}", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        getattr(operations, name)(*args, **kwargs)
        if reference is None:
            return args[0].argmax(dim=1).int()
        kept = {
            key: value
            for key, value in kwargs.items()
            if key not in ("is_batch_invariant", "segment_keys", "scales", "max_queries")
        }
        return reference(*args, **kept)

    return run


def record_at_once(run: Callable[[], object]) -> Callable[[], None]:
    """Call the recorded function as often as `GraphRecorder` does before a replay."""
    run()

    def replay() -> None:
        run()

    return replay


def random_steps(generator: np.random.Generator, num_steps: int, lora: AdapterRef) -> list[Step]:
    """Plan random steps in which sequences, some with an adapter, start, are prefilled in chunks alongside decodes, and
    end.
    """
    steps, lengths, computed = [], dict[int, int](), dict[int, int]()
    for _ in range(num_steps):
        released = [row for row in lengths if computed[row] >= lengths[row] and generator.random() < 0.1]
        released += [row for row in lengths if computed[row] > 100 and row not in released]
        for row in released:
            del lengths[row], computed[row]
        new, contexts, left = [], [], MOST_TOKENS - len(lengths)
        free = [row for row in range(NUM_ROWS) if row not in lengths]
        decoding = [row for row in lengths if computed[row] >= lengths[row]]
        if free and generator.random() < 0.5:
            lengths[free[0]], computed[free[0]] = int(generator.integers(1, 60)), 0
            new.append(
                NewSequence(
                    row=free[0],
                    token_ids=generator.integers(0, TINY["vocab_size"], lengths[free[0]]).astype(np.int32),
                    num_prompt_tokens=lengths[free[0]],
                    block_ids=np.arange(BLOCKS_EACH, dtype=np.int32) + free[0] * BLOCKS_EACH,
                    sampling=SAMPLINGS[int(generator.integers(len(SAMPLINGS)))],
                    lora=lora if generator.random() < 0.3 else None,
                )
            )
        for row in lengths:
            if computed[row] < lengths[row] and left > 0:
                count = min(int(generator.integers(1, left + 1)), lengths[row] - computed[row])
                contexts.append((row, computed[row], count))
                left -= count
        decoding = [row for row in decoding if generator.random() < 0.9]
        for row, _, count in contexts:
            computed[row] += count
        for row in decoding:
            computed[row] += 1
        columns = np.array(contexts, dtype=np.int32).reshape(-1, 3).T
        steps.append(
            Step(
                released_rows=np.array(released, dtype=np.int32),
                new_sequences=tuple(new),
                context_rows=columns[0],
                context_starts=columns[1],
                context_lengths=columns[2],
                generation_rows=np.array(sorted(decoding), dtype=np.int32),
            )
        )
    return steps


def make_runner() -> ModelRunner:
    """Return a warmed-up runner that uses the GPU code path."""
    return random_runner(
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
    )


def main() -> None:
    """Print one JSON object: the number of keys after the warm-up, and the keys that are new after that."""
    keys = Keys()
    driver.set_active(NoDevice())
    JITFunction.__getitem__ = lambda function, grid: keys.launch(function)
    names = [name for name in operations.__all__ if name != "segment_keys_for"]
    traced = types.SimpleNamespace(**{name: with_results(name) for name in names})
    vars(dispatch).update(triton=traced, _takes_triton=lambda x: True)
    vars(attention).update(_num_processors=lambda device: 132)
    vars(limits).update(recorder_for=lambda device: lambda: record_at_once)
    runner = make_runner()
    warm = set(keys.seen)
    lora = runner.adapters.add(zero_adapter(runner.model.description))
    for step in random_steps(np.random.default_rng(0), 150, lora):
        runner.run_step(step)
    runner.close()
    print(json.dumps({"triton": triton.__version__, "warm": len(warm), "new": sorted(keys.seen - warm)}))


if __name__ == "__main__":
    main()
