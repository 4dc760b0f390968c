"""Steps to run before registration, so that no client waits for one-time work such as compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpu_worker.batch.step import GREEDY, AdapterRef, IntArray, NewSequence, SamplingParams, Step

CPU_NUM_TOKENS = 16
# Number of decode steps of a full batch; the second step takes its tokens from the first.
_NUM_DECODES = 2
# Sampling parameters that differ in which kernels run or which buffers these need; each is run with a full batch.
_SAMPLINGS = (
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(
        top_p=0.9,
        top_p_decay=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        embedding_bias=((0, 1.0),),
        bad_words=((1,),),
        no_repeat_ngram_size=3,
        allowed_token_ids=(0, 2, 3),
        min_tokens=1,
        end_ids=(2,),
        log_probs=5,
    ),
)


def warm_up_steps(num_tokens: int, num_blocks: int) -> tuple[Step, Step]:
    """Return a prefill of a sequence with `num_tokens` tokens that holds all blocks, and a decode step of it."""
    sequence = NewSequence(
        row=0,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        block_ids=np.arange(num_blocks, dtype=np.int32),
        sampling=GREEDY,
    )
    length, zero = np.array([num_tokens], dtype=np.int32), np.zeros(1, dtype=np.int32)
    prefill = Step(new_sequences=(sequence,), context_rows=zero, context_starts=zero, context_lengths=length)
    return prefill, Step(generation_rows=zero)


def short_query_steps(max_sequence_length: int, num_blocks: int, tokens_per_block: int) -> tuple[Step, ...]:
    """Return steps that compute the last two tokens of the longest sequence that the pool can hold."""
    length = min(max_sequence_length - 1, num_blocks * tokens_per_block - 1)
    if length < 2:
        return ()
    zero = np.zeros(1, dtype=np.int32)
    sequence = NewSequence(
        row=0,
        token_ids=np.zeros(length, dtype=np.int32),
        num_prompt_tokens=length,
        block_ids=np.arange(-(-(length + 1) // tokens_per_block), dtype=np.int32),
        sampling=GREEDY,
    )
    starts, lengths = np.array([length - 2], dtype=np.int32), np.array([2], dtype=np.int32)
    return (Step(new_sequences=(sequence,), context_rows=zero, context_starts=starts, context_lengths=lengths),)


@dataclass(frozen=True, slots=True)
class FullBatches:
    """Steps with the maximum number of sequences, and with the longest prompts that fit together in one step."""

    num_sequences: int
    num_tokens: int
    blocks_each: int

    @classmethod
    def of(
        cls, max_batch_size: int, max_num_tokens: int, max_sequence_length: int, tokens_per_block: int
    ) -> FullBatches:
        """Return the largest batches that the limits allow."""
        num_sequences = min(max_batch_size, max_num_tokens)
        num_tokens = max(1, min(max_num_tokens // num_sequences, max_sequence_length - _NUM_DECODES - 1))
        return cls(num_sequences, num_tokens, -(-(num_tokens + _NUM_DECODES + 1) // tokens_per_block))

    @property
    def num_blocks(self) -> int:
        """Total number of blocks of all sequences."""
        return self.num_sequences * self.blocks_each

    def runs(self) -> Iterator[tuple[Step, ...]]:
        """Yield a prefill and decode steps for each way of sampling; each of these series starts with empty rows."""
        for sampling in _SAMPLINGS:
            yield self.run(sampling)

    def run(self, sampling: SamplingParams, lora: AdapterRef | None = None) -> tuple[Step, ...]:
        """Return a prefill and decode steps for sequences with these parameters and this adapter."""
        rows = np.arange(self.num_sequences, dtype=np.int32)
        prefill = Step(
            new_sequences=tuple(self._sequence(row, sampling, lora) for row in rows.tolist()),
            context_rows=rows,
            context_starts=np.zeros_like(rows),
            context_lengths=np.full_like(rows, self.num_tokens),
        )
        return prefill, *(Step(generation_rows=rows),) * _NUM_DECODES

    def _sequence(self, row: int, sampling: SamplingParams, lora: AdapterRef | None) -> NewSequence:
        blocks: IntArray = np.arange(self.blocks_each, dtype=np.int32) + row * self.blocks_each
        return NewSequence(
            row=row,
            token_ids=np.zeros(self.num_tokens, dtype=np.int32),
            num_prompt_tokens=self.num_tokens,
            block_ids=blocks,
            sampling=sampling,
            lora=lora,
        )
