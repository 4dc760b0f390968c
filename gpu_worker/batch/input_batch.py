"""Converts scheduler steps to model inputs: the one place that maps context and generation to prefill and decode.

A step first changes the rows: rows are released, added and forked, and block tables grow. Each context chunk then
becomes a prefill of some of its row's known tokens, and each generation row a decode of its last token. Both go through
the model in one flattened pass, prefills first. Decode rows are handled as vectors, so a steady-state step does no work
per token in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import EMPTY, IntArray, Step
from gpu_worker.lora.rows import RowAdapters
from gpu_worker.models.decoder import ForwardInputs
from gpu_worker.speculation.drafts import Drafter
from gpu_worker.speculation.verification import NO_DRAFTS, Drafts, with_shadows
from midstream.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Tokens [start, start + length) of a row to be prefilled; with `samples`, the next token is sampled."""

    row: int
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The model's input for one step.

    Attributes:
        inputs: Inputs of the model; None if no row is left to run.
        sampled_rows: Rows that sample a token, in the order of the output.
        is_run: bool [sampled rows]; False if the row has failed and is not in `inputs`.
        contexts: Context chunks in `inputs`, where they precede the generation rows.
        failed_contexts: Context chunks left out of `inputs` because their rows have failed.
        drafts: Draft tokens to verify for generation rows.
        reports_digests: Whether to report digests of the logits.
    """

    inputs: ForwardInputs | None
    sampled_rows: IntArray
    is_run: np.ndarray[tuple[int], np.dtype[np.bool_]]
    contexts: list[ContextChunk]
    failed_contexts: list[ContextChunk]
    drafts: Drafts = NO_DRAFTS
    reports_digests: bool = False


class InputBatch:
    """The rows of all sequences and the set of generating rows, both of which persist between steps."""

    def __init__(
        self, rows: Rows, tokens_per_block: int, adapters: RowAdapters[Any], drafter: Drafter | None = None
    ) -> None:
        self.rows = rows
        self._drafter = drafter or Drafter(rows)
        self.adapters = adapters
        self._tokens_per_block = tokens_per_block
        self._generation: IntArray = EMPTY

    def clear(self) -> None:
        self.rows.clear()
        self.adapters.clear()
        self._generation = EMPTY

    def prepare(self, step: Step) -> PreparedStep:
        """Apply `step` to the rows and return the model's input; the caller must copy the blocks `copy_sources` to
        `copy_targets`.

        Raises:
            ExecutionError: The step contradicts earlier steps; the epoch must be abandoned.
        """
        self._apply(step)
        contexts, sampling_contexts = self._prefills(step)
        decodes = sampled_rows = self._generation
        drafts = NO_DRAFTS
        if len(step.draft_rows):
            self._check(step.draft_rows)
            drafts = Drafts(self._drafter.propose(step))
            sampled_rows = with_shadows(self.rows, decodes, drafts)
        if len(sampling_contexts):
            sampled_rows = np.concatenate([sampling_contexts, sampled_rows])
        failed_contexts: list[ContextChunk] = []
        if self.rows.failed:
            failed_contexts = [context for context in contexts if context.row in self.rows.failed]
            failed = np.array(list(self.rows.failed), dtype=np.int32)
            contexts = [context for context in contexts if context.row not in self.rows.failed]
            decodes = decodes[~np.isin(decodes, failed)]
            is_run = ~np.isin(sampled_rows, failed)
        else:
            is_run = np.ones(len(sampled_rows), dtype=np.bool_)
        inputs = self._flatten(contexts, decodes, drafts) if contexts or len(decodes) else None
        return PreparedStep(inputs, sampled_rows, is_run, contexts, failed_contexts, drafts, step.reports_digests)

    def rows_of(self, step: Step) -> tuple[IntArray, IntArray]:
        """Return the rows that a step changes before it runs, and the rows that run in it. Call before `prepare`."""
        named = [new.row for new in step.new_sequences]
        named += [row for fork in step.forks for row in (fork.from_row, fork.to_row)]
        changed = np.concatenate([step.released_rows, np.array(named, dtype=np.int32), step.beam_rows])
        return changed, np.concatenate([step.context_rows, self._next_generation(step)])

    def _apply(self, step: Step) -> None:
        rows = self.rows
        if len(step.released_rows):
            self._check(step.released_rows)
            rows.release(step.released_rows)
            self.adapters.release(step.released_rows)
        for new in step.new_sequences:
            rows.add(self.adapters.take(new))
        if step.forks:
            self._check(np.array([fork.from_row for fork in step.forks], dtype=np.int32))
            rows.fork(step.forks)
            self.adapters.fork(step.forks)
        if len(step.beam_rows):
            self._check(step.beam_rows)
            rows.append_tokens(step.beam_rows, step.beam_tokens)
        if len(step.block_rows):
            self._check(step.block_rows)
            rows.append_blocks(step.block_rows, step.block_ids)
        self._generation = self._next_generation(step)
        if len(self._generation):
            self._check(self._generation)

    def _next_generation(self, step: Step) -> IntArray:
        if not step.repeat_generation:
            generation = np.unique(step.generation_rows)
        elif not (len(step.released_rows) or len(step.idle_rows) or len(step.generation_rows)):
            return self._generation
        else:
            leaving = np.concatenate([step.released_rows, step.idle_rows])
            kept = self._generation[~np.isin(self._generation, leaving)] if len(leaving) else self._generation
            generation = np.union1d(kept, step.generation_rows).astype(np.int32, copy=False)
        return generation

    def _check(self, rows: IntArray) -> None:
        if rows.min() < 0 or rows.max() >= self.rows.num_rows or not self.rows.is_active[rows].all():
            raise ExecutionError("the step contains an inactive row")

    def _prefills(self, step: Step) -> tuple[list[ContextChunk], IntArray]:
        """Return the context chunks and the rows that sample."""
        if not len(step.context_rows):
            return [], EMPTY
        self._check(step.context_rows)
        contexts = []
        for row, start, length in zip(
            step.context_rows.tolist(), step.context_starts.tolist(), step.context_lengths.tolist(), strict=True
        ):
            known = int(self.rows.lengths[row])
            is_failed = row in self.rows.failed
            if not is_failed and not (0 <= start < start + length <= known):
                raise ExecutionError(
                    f"the step computes tokens {start} to {start + length} of row {row}; only {known} tokens are known"
                )
            contexts.append(ContextChunk(row, start, length, samples=start + length == known))
        return contexts, np.array([chunk.row for chunk in contexts if chunk.samples], dtype=np.int32)

    def _verified(self, decodes: IntArray, drafts: Drafts) -> list[ContextChunk]:
        """Return each generating row's last token and draft tokens as a chunk in which every position is sampled."""
        lengths = self.rows.lengths[decodes].tolist()
        return [
            ContextChunk(row, length - 1, 1 + len(drafts.tokens.get(row, EMPTY)), samples=True)
            for row, length in zip(decodes.tolist(), lengths, strict=True)
        ]

    def _flatten(self, contexts: list[ContextChunk], decodes: IntArray, drafts: Drafts) -> ForwardInputs:
        rows = self.rows
        counts = [int(chunk.samples) for chunk in contexts]
        if drafts.tokens:
            verified = self._verified(decodes, drafts)
            contexts, decodes = contexts + verified, EMPTY
            counts += [chunk.length for chunk in verified]
        last = rows.lengths[decodes] - 1
        if not contexts:
            batch_rows, token_ids, positions, token_rows = decodes, rows.tokens[decodes, last], last, decodes
            query_starts = np.arange(len(decodes) + 1, dtype=np.int32)
            context_lens, sampled = last + 1, query_starts[:-1]
        else:
            chunk_rows = np.array([chunk.row for chunk in contexts], dtype=np.int32)
            lengths = np.array([chunk.length for chunk in contexts], dtype=np.int32)
            ends = np.array([chunk.start + chunk.length for chunk in contexts], dtype=np.int32)
            batch_rows = np.concatenate([chunk_rows, decodes])
            chunks = [rows.tokens[chunk.row, chunk.start : chunk.start + chunk.length] for chunk in contexts]
            token_ids = np.concatenate([*chunks, rows.tokens[decodes, last]])
            spans = [np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32) for chunk in contexts]
            positions = np.concatenate([*spans, last])
            token_rows = np.concatenate([np.repeat(chunk_rows, lengths), decodes])
            query_starts = np.zeros(len(batch_rows) + 1, dtype=np.int32)
            np.cumsum(np.concatenate([lengths, np.ones_like(decodes)]), out=query_starts[1:])
            context_lens = np.concatenate([ends, last + 1])
            sampled = last_of_each(query_starts[1:], np.concatenate([counts, np.ones_like(decodes)]))
        places = positions // self._tokens_per_block
        most_blocks = -(-int(context_lens.max()) // self._tokens_per_block)
        if (context_lens > rows.num_blocks[batch_rows] * self._tokens_per_block).any():
            raise ExecutionError("a block table is too short for its sequence")
        slots = rows.block_tables[token_rows, places] * self._tokens_per_block + positions % self._tokens_per_block
        token_ids, virtual = self.adapters.embeddings(token_ids, token_rows)
        return ForwardInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(rows.block_tables[batch_rows, :most_blocks]),
            sampled=torch.from_numpy(sampled),
            adapters=self.adapters.adapters(token_rows),
            virtual=virtual,
        )


def last_of_each(ends: IntArray, counts: IntArray) -> IntArray:
    """Return the indices of the last counts[i] tokens before ends[i], for each i."""
    firsts = np.repeat(ends - counts, counts)
    within = np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return (firsts + within).astype(np.int32)
