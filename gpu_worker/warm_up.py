"""What a worker runs before it registers, so that nothing is done for the first time for a client."""

from __future__ import annotations

import numpy as np

from gpu_worker.batch.step import GREEDY, NewSequence, Step

CPU_NUM_TOKENS = 16


def warm_up_steps(num_tokens: int, num_blocks: int) -> tuple[Step, Step]:
    """A prefill of one sequence of so many tokens, which holds all blocks, and a decode of it."""
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
