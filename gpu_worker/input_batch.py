"""Turns a step into the model's input: the one place where context and generation become prefill and decode.

A step first changes the rows (released, added, forked, block tables grown). Then each context chunk is a prefill of
some of its row's known tokens, and each generation row a decode of its last token. Both go through the model in one
flattened pass, prefills first. Decode rows are handled as vectors, so a steady step has no work per token in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.rows import Rows
from gpu_worker.step import EMPTY, IntArray, Step
from midstream.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """What the model runs.

    Attributes:
        inputs: None when no row is left to run.
        sampled_rows: Rows that sample, in the order of the answer.
        is_run: bool [sampled rows]; False: the row has failed and is not in `inputs`.
    """

    inputs: ForwardInputs | None
    sampled_rows: IntArray
    is_run: np.ndarray[tuple[int], np.dtype[np.bool_]]


class InputBatch:
    """Rows, and the generation set that steps repeat."""

    def __init__(self, rows: Rows, tokens_per_block: int) -> None:
        self.rows = rows
        self._tokens_per_block = tokens_per_block
        self._generation: IntArray = EMPTY

    def clear(self) -> None:
        """Forgets all sequences."""
        self.rows.clear()
        self._generation = EMPTY

    def prepare(self, step: Step) -> PreparedStep:
        """Applies `step` to the rows and gives the model's input (copy_sources and copy_targets are the caller's).

        Raises:
            ExecutionError: The step contradicts what came before it; nothing more of this epoch can be trusted.
        """
        self._apply(step)
        contexts, sampling_contexts = self._prefills(step)
        decodes = self._generation
        sampled_rows = np.concatenate([sampling_contexts, decodes]) if len(sampling_contexts) else decodes
        if self.rows.failed:
            failed = np.array(list(self.rows.failed), dtype=np.int32)
            contexts = [context for context in contexts if context[0] not in self.rows.failed]
            decodes = decodes[~np.isin(decodes, failed)]
            is_run = ~np.isin(sampled_rows, failed)
        else:
            is_run = np.ones(len(sampled_rows), dtype=np.bool_)
        inputs = self._flatten(contexts, decodes) if contexts or len(decodes) else None
        return PreparedStep(inputs, sampled_rows, is_run)

    def _apply(self, step: Step) -> None:
        rows = self.rows
        if len(step.released_rows):
            self._check(step.released_rows)
            rows.release(step.released_rows)
        for new in step.new_sequences:
            rows.add(new)
        if step.forks:
            self._check(np.array([row for fork in step.forks for row in (fork.from_row, fork.to_row)], dtype=np.int32))
            rows.fork(step.forks)
        if len(step.block_rows):
            self._check(step.block_rows)
            rows.append_blocks(step.block_rows, step.block_ids)
        self._generation = self._next_generation(step)

    def _next_generation(self, step: Step) -> IntArray:
        if not step.repeat_generation:
            generation = np.unique(step.generation_rows)
        elif not (len(step.released_rows) or len(step.idle_rows) or len(step.generation_rows)):
            return self._generation
        else:
            leaving = np.concatenate([step.released_rows, step.idle_rows])
            kept = self._generation[~np.isin(self._generation, leaving)] if len(leaving) else self._generation
            generation = np.union1d(kept, step.generation_rows).astype(np.int32, copy=False)
        if len(generation):
            self._check(generation)
        return generation

    def _check(self, rows: IntArray) -> None:
        if rows.min() < 0 or rows.max() >= self.rows.num_rows or not self.rows.is_active[rows].all():
            raise ExecutionError("the step names a row that holds no sequence")

    def _prefills(self, step: Step) -> tuple[list[tuple[int, int, int, bool]], IntArray]:
        """The context chunks as (row, start, length, samples), and the rows that sample."""
        if not len(step.context_rows):
            return [], EMPTY
        self._check(step.context_rows)
        without_sample = set(step.context_without_sample.tolist())
        contexts = []
        for row, start, length in zip(
            step.context_rows.tolist(), step.context_starts.tolist(), step.context_lengths.tolist(), strict=True
        ):
            known = int(self.rows.lengths[row])
            is_failed = row in self.rows.failed
            if not is_failed and not (0 <= start < start + length <= known):
                raise ExecutionError(f"tokens {start} to {start + length} of row {row}, which has {known}")
            samples = start + length == known and row not in without_sample
            contexts.append((row, start, length, samples))
        return contexts, np.array([row for row, _, _, samples in contexts if samples], dtype=np.int32)

    def _flatten(self, contexts: list[tuple[int, int, int, bool]], decodes: IntArray) -> ForwardInputs:
        rows = self.rows
        last = rows.lengths[decodes] - 1
        if not contexts:
            batch_rows, token_ids, positions, token_rows = decodes, rows.tokens[decodes, last], last, decodes
            query_starts = np.arange(len(decodes) + 1, dtype=np.int32)
            context_lens, sampled = last + 1, query_starts[:-1]
        else:
            chunk_rows = np.array([row for row, _, _, _ in contexts], dtype=np.int32)
            lengths = np.array([length for _, _, length, _ in contexts], dtype=np.int32)
            ends = np.array([start + length for _, start, length, _ in contexts], dtype=np.int32)
            samples = np.array([samples for _, _, _, samples in contexts], dtype=np.bool_)
            batch_rows = np.concatenate([chunk_rows, decodes])
            chunks = [rows.tokens[row, start : start + length] for row, start, length, _ in contexts]
            token_ids = np.concatenate([*chunks, rows.tokens[decodes, last]])
            spans = [np.arange(start, start + length, dtype=np.int32) for _, start, length, _ in contexts]
            positions = np.concatenate([*spans, last])
            token_rows = np.concatenate([np.repeat(chunk_rows, lengths), decodes])
            query_starts = np.zeros(len(batch_rows) + 1, dtype=np.int32)
            np.cumsum(np.concatenate([lengths, np.ones_like(decodes)]), out=query_starts[1:])
            context_lens = np.concatenate([ends, last + 1])
            samples = np.concatenate([samples, np.ones(len(decodes), dtype=np.bool_)])
            sampled = query_starts[1:][samples] - 1
        places = positions // self._tokens_per_block
        most_blocks = -(-int(context_lens.max()) // self._tokens_per_block)
        if (context_lens > rows.num_blocks[batch_rows] * self._tokens_per_block).any():
            raise ExecutionError("a block table does not reach as far as its sequence")
        slots = rows.block_tables[token_rows, places] * self._tokens_per_block + positions % self._tokens_per_block
        return ForwardInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(rows.block_tables[batch_rows, :most_blocks]),
            sampled=torch.from_numpy(sampled),
        )
