"""The keys under which Triton caches compiled kernels, for random steps of a runner on the GPU code path.

Kernels are not run: each launch is recorded with its key (types, pointer alignment, integers that are 1 or multiples of
16, constants), and PyTorch's operations compute the results.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from gpu_worker import limits
from gpu_worker.batch.step import AdapterRef, NewSequence, SamplingParams, Step
from gpu_worker.model_runner import ModelRunner
from kernels import dispatch
from kernels import triton as operations
from kernels.activation import activate
from kernels.triton import attention

VOCAB_SIZE = 300
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
        self._binders: dict[str, Callable[..., Any]] = {}

    def launch(self, function: JITFunction | InterpretedFunction) -> Callable[..., object]:
        """Return a function that records the launches of `function`."""
        if function.__name__ not in self._binders:
            compiled = function
            if isinstance(function, InterpretedFunction):
                compiled = JITFunction(function.fn, **function.kwargs)
            self._binders[function.__name__] = compiled.create_binder()[-1]

        def record(*args: object, **kwargs: object) -> None:
            _, specialization, options = self._binders[function.__name__](*args, debug=False, **kwargs)
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
            if key not in ("is_batch_invariant", "is_partial", "segment_keys", "scales", "max_queries", "activation")
        }
        result = reference(*args, **kept)
        activation = kwargs.get("activation")
        return result if activation is None else activate(result, activation)

    return run


def record_at_once(run: Callable[[], object]) -> Callable[[], None]:
    """Stand in for `GraphRecorder`: call the function once when it is recorded, and once in each replay."""
    run()

    def replay() -> None:
        run()

    return replay


def random_steps(generator: np.random.Generator, num_steps: int, lora: AdapterRef | None) -> list[Step]:
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
                    token_ids=generator.integers(0, VOCAB_SIZE, lengths[free[0]]).astype(np.int32),
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


def trace(patch: pytest.MonkeyPatch) -> Keys:
    """Make this process use the GPU code path on a CPU, and record the launches of kernels."""
    keys, nothing = Keys(), types.SimpleNamespace()
    nothing.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    patch.setattr(type(driver), "active", nothing)
    for kind in (JITFunction, InterpretedFunction):
        patch.setattr(kind, "__getitem__", lambda function, grid: keys.launch(function))
    names = [name for name in operations.__all__ if name != "segment_keys_for"]
    traced = types.SimpleNamespace(**{name: with_results(name) for name in names})
    patch.setattr(dispatch, "triton", traced, raising=False)
    patch.setattr(dispatch, "_takes_triton", lambda x: True)
    patch.setattr(attention, "num_processors", lambda device: 132)
    patch.setattr(limits, "recorder_for", lambda device: lambda: record_at_once)
    return keys


def new_keys(keys: Keys, runner: ModelRunner, num_steps: int, lora: AdapterRef | None = None) -> list[tuple[str, str]]:
    """Return the keys that random steps of a warmed-up runner add; close the runner."""
    warm = set(keys.seen)
    for step in random_steps(np.random.default_rng(0), num_steps, lora):
        runner.run_step(step)
    runner.close()
    return sorted(keys.seen - warm)
