"""Chooses the implementation of paged attention for each kind of step on a device: our own, unless another one was
measured to be faster or was requested.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from kernels.attention_backend import AttentionBackend, AttentionCase
from kernels.flash_attention import load_flash_attention
from kernels.flashinfer_attention import load_flashinfer

logger = logging.getLogger(__name__)

# Another implementation is used if its time is at most this fraction of ours.
_FASTER = 0.97
# Maximum tokens of the cache that a measurement reads: more than the device's hardware caches hold.
_MAX_CACHED_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class StepShape:
    """A kind of step, in which all sequences have equally many queries and keys."""

    num_sequences: int
    num_queries: int
    context: int


DECODES = (StepShape(1, 1, 4096), StepShape(8, 1, 2048), StepShape(64, 1, 1024), StepShape(256, 1, 1024))
PROMPTS = (StepShape(1, 64, 1024), StepShape(1, 512, 512), StepShape(4, 512, 512))

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Time = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The implementation for each kind of step; a step uses that of the nearest smaller kind.

    Attributes:
        backends: Implementations by kind; kinds that are missing use our own.
    """

    backends: Mapping[StepShape, AttentionBackend]

    def backend(self, case: AttentionCase, num_tokens: int) -> AttentionBackend | None:
        """Return the implementation for a step of num_tokens tokens; None means our own."""
        kinds = DECODES if case.has_single_queries else PROMPTS
        smaller = [kind for kind in kinds if kind.num_sequences * kind.num_queries <= num_tokens]
        backend = self.backends.get(smaller[-1] if smaller else kinds[0])
        return backend if backend is not None and backend.refusal(case) is None else None

    def __str__(self) -> str:
        """Return the implementations and their kinds, for a log line."""
        parts = [
            f"{backend.name} for {kind.num_sequences} x {kind.num_queries}" for kind, backend in self.backends.items()
        ]
        return ", ".join(parts) or "no other"


OWN = AttentionChoice({})


def installed(capability: tuple[int, int]) -> dict[str, AttentionBackend]:
    """Return the other implementations that run on devices of this compute capability, by their names in settings."""
    found = {"flash-attn": load_flash_attention(capability), "flashinfer": load_flashinfer(capability)}
    return {name: backend for name, backend in found.items() if backend is not None}


def requested(name: str, case: AttentionCase, capability: tuple[int, int]) -> AttentionChoice:
    """Return a choice that uses one implementation for every step that it supports. Raises ValueError if it is not
    installed for this device, or supports no kind of step.
    """
    backend = installed(capability).get(name)
    if backend is None:
        raise ValueError(f"{name} is not installed for compute capability {capability[0]}.{capability[1]}")
    reasons = {
        kinds: backend.refusal(replace(case, has_single_queries=kinds is DECODES)) for kinds in (DECODES, PROMPTS)
    }
    if all(reasons.values()):
        raise ValueError(f"{backend.name} needs {reasons[DECODES]}")
    for kinds, reason in reasons.items():
        if reason is not None:
            steps = "decode steps" if kinds is DECODES else "prompts"
            logger.warning("Triton computes the attention of %s, because %s needs %s", steps, backend.name, reason)
    able = [kind for kinds, reason in reasons.items() if reason is None for kind in kinds]
    return AttentionChoice(dict.fromkeys(able, backend))


def measured(
    backends: Sequence[AttentionBackend], own: Attend, case: AttentionCase, device: torch.device, time: Time
) -> AttentionChoice:
    """Return the choice of the fastest implementation for each kind of step.

    Args:
        backends: The installed implementations.
        own: Our own implementation, as a function of queries, caches, block tables, query starts and context lengths.
        time: Measures how long a function takes on the device.
    """
    chosen: dict[StepShape, AttentionBackend] = {}
    for kind in (*DECODES, *PROMPTS):
        keys_per_query = kind.context / kind.num_queries
        asked = replace(case, has_single_queries=kind.num_queries == 1, keys_per_query=keys_per_query)
        able = [backend for backend in backends if backend.refusal(asked) is None]
        if able:
            step = _step(kind, case, device)
            best_s = _FASTER * time(functools.partial(own, *step))
            for backend in able:
                took_s = _seconds(backend, step, asked, time)
                if took_s <= best_s:
                    chosen[kind], best_s = backend, took_s
    return AttentionChoice(chosen)


def _seconds(backend: AttentionBackend, step: tuple[Tensor, ...], case: AttentionCase, time: Time) -> float:
    """Return how long a step takes; infinity if it fails, for example because the package was built for another
    device, or cannot be recorded in a graph.
    """
    num_queries = step[0].shape[0] // step[5].shape[0]
    q, keys, values, tables, starts, lens = step
    scale = case.head_dim**-0.5

    def run() -> Tensor:
        return backend(q, keys, values, tables, starts, lens, scale, None, case.softcap, num_queries)

    try:
        return time(run)
    except Exception:
        logger.warning("%s fails here and is not used", backend.name, exc_info=True)
        return math.inf


def device_seconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes on the current CUDA device: the median of 5 replays of a graph of 10 runs.

    Runs are recorded in a graph, like most steps; launched one by one, short runs would take as long as the host needs
    to launch them.
    """
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e4)
    return median(times)


def _step(kind: StepShape, case: AttentionCase, device: torch.device) -> tuple[Tensor, ...]:
    """Return queries, caches, block tables, query starts and context lengths for a step of this kind."""
    blocks_each = -(-kind.context // case.block_size)
    num_blocks = min(kind.num_sequences * blocks_each, max(blocks_each, _MAX_CACHED_TOKENS // case.block_size))
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    keys, values = (torch.zeros(shape, dtype=case.kv_dtype, device=device) for _ in range(2))
    num_tokens = kind.num_sequences * kind.num_queries
    q = torch.zeros(num_tokens, case.num_heads, case.head_dim, dtype=case.dtype, device=device)
    count = torch.arange(kind.num_sequences * blocks_each, dtype=torch.int32, device=device)
    tables = (count % num_blocks).view(kind.num_sequences, blocks_each)
    starts = torch.arange(kind.num_sequences + 1, dtype=torch.int32, device=device) * kind.num_queries
    lens = torch.full((kind.num_sequences,), kind.context, dtype=torch.int32, device=device)
    return q, keys, values, tables, starts, lens
