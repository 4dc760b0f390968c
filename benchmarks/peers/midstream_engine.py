"""Midstream's worker alone, in process, without router, scheduler, detokenizer or sockets: the reference for the
service.

A request waits until a row and enough KV blocks are free. Its prompt runs in chunks of the tokens that decode rows
leave free in each step. Then the request is part of every step until its last token, and releases its row and blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .midstream_service import own_python
from .peer import Figures, Paths, Request, Runner, Step, Workload

if TYPE_CHECKING:
    from gpu_worker.batch import step as worker_step
    from gpu_worker.model_runner import ModelRunner

TOKENS_PER_BLOCK = 16
MAX_KV_TOKENS = 1 << 15


@dataclass(slots=True)
class Running:
    """A request that occupies a row."""

    row: int
    request: Request
    block_ids: list[int]
    num_prefilled: int = 0
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class MidstreamEngine:
    """The worker's model runner with a minimal scheduler."""

    name: str = "midstream-engine"
    label: str = "Midstream, its worker alone, in process"
    # Prefix sharing needs the scheduler, which is not used here.
    workloads: Sequence[str] = ("single", "mixed", "prefill", "chat")

    def python(self, paths: Paths) -> Path:
        return own_python(paths)

    def steps(self, paths: Paths) -> Sequence[Step]:
        return ()

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        from gpu_worker.model_runner import ModelRunner
        from midstream.config import WorkerConfig
        from midstream.model.folder import open_model_folder

        config = WorkerConfig(
            model=str(paths.model_folder), max_kv_tokens=MAX_KV_TOKENS, tokens_per_block=TOKENS_PER_BLOCK
        )
        runner = ModelRunner(config, open_model_folder(config.model))

        def run(workload: Workload) -> Figures:
            runner.clear()
            start = time.perf_counter()
            _Loop(runner, workload).run()
            duration = time.perf_counter() - start
            return Figures(workload.name, workload.num_counted_tokens / duration, duration)

        yield run


class _Loop:
    """Run a workload to its end."""

    def __init__(self, runner: ModelRunner, workload: Workload) -> None:
        self._runner = runner
        self._waiting = deque(workload.requests)
        self._running: list[Running] = []
        self._released: list[int] = []
        self._free_rows = list(range(workload.concurrency))
        self._free_blocks = list(range(runner.kv.num_blocks))

    def run(self) -> None:
        while self._waiting or self._running:
            self._runner.run_step(self._next_step())
            self._release_finished()

    def _next_step(self) -> worker_step.Step:
        import numpy as np

        from gpu_worker.batch.step import NewSequence, Step

        def array(values: Sequence[int]) -> worker_step.IntArray:
            return np.array(values, dtype=np.int32)

        decodes = [it for it in self._running if it.num_generated]
        budget = self._runner.max_num_tokens - len(decodes)
        added = self._admit(budget - sum(_left(it) for it in self._running))
        chunks: list[tuple[int, int, int]] = []
        for it in self._running:
            length = min(_left(it), budget)
            if length:
                chunks.append((it.row, it.num_prefilled, length))
                it.num_prefilled += length
                budget -= length
                it.num_generated += not _left(it)
        for it in decodes:
            it.num_generated += 1
        new = tuple(
            NewSequence(
                row=it.row,
                token_ids=array(it.request.token_ids),
                num_prompt_tokens=len(it.request.token_ids),
                block_ids=array(it.block_ids),
            )
            for it in added
        )
        rows, starts, lengths = zip(*chunks, strict=True) if chunks else ((), (), ())
        released, self._released = self._released, []
        return Step(
            released_rows=array(released),
            new_sequences=new,
            context_rows=array(rows),
            context_starts=array(starts),
            context_lengths=array(lengths),
            generation_rows=array([it.row for it in decodes]),
        )

    def _admit(self, budget: int) -> list[Running]:
        """Start waiting requests, in order, whose prompts fit into this step."""
        added = []
        while self._waiting and self._free_rows and budget > 0:
            request = self._waiting[0]
            num_blocks = -(-(len(request.token_ids) + request.max_tokens) // TOKENS_PER_BLOCK)
            if num_blocks > len(self._free_blocks):
                break
            block_ids = [self._free_blocks.pop() for _ in range(num_blocks)]
            added.append(Running(self._free_rows.pop(), self._waiting.popleft(), block_ids))
            budget -= len(request.token_ids)
        self._running += added
        return added

    def _release_finished(self) -> None:
        for it in self._running:
            if it.num_generated == it.request.max_tokens:
                self._released.append(it.row)
                self._free_rows.append(it.row)
                self._free_blocks += it.block_ids
        self._running = [it for it in self._running if it.num_generated < it.request.max_tokens]


def _left(sequence: Running) -> int:
    """Return the number of prompt tokens that have not been computed."""
    return len(sequence.request.token_ids) - sequence.num_prefilled
