"""Gives speculative sequences of a step room for drafts.

The worker makes the drafts and verifies them in the step's one forward pass; the result holds those that were accepted
and one token more. So the sequence's table must reach as far as all its drafts. Blocks that were taken for drafts which
were not accepted stay in the table, for the tokens that come instead.
"""

from __future__ import annotations

from scheduler.core.effects import StepPlan
from scheduler.core.request import Sequence
from scheduler.core.worker_group import WorkerGroup


def plan_drafts(
    group: WorkerGroup, chosen: list[Sequence], max_tokens: int, plan: StepPlan, limits: dict[Sequence, int]
) -> int:
    """Lets speculative sequences verify drafts, as far as tokens and blocks go.

    Args:
        group: Where they run.
        chosen: Sequences of the step, whose own token is not counted as computed yet.
        max_tokens: Tokens that the step has left.
        plan: Takes the limits, and the blocks by which tables grow.
        limits: Takes the limit of each sequence that has one.

    Returns:
        Tokens of the step's budget that are taken for drafts.
    """
    num_taken = 0
    for sequence in chosen:
        spec = sequence.request.spec
        limit = min(spec.num_draft_tokens, max_tokens - num_taken, spec.max_num_tokens - sequence.num_computed - 1)
        if limit <= 0:
            continue
        limit = min(limit, _grow(group, sequence, sequence.num_computed + 1 + limit, plan) - sequence.num_computed - 1)
        if limit <= 0:
            continue
        assert sequence.row is not None
        plan.draft_rows.append(sequence.row)
        plan.draft_limits.append(limit)
        limits[sequence] = limit
        num_taken += limit
    return num_taken


def _grow(group: WorkerGroup, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
    """Grows a table to hold `num_tokens`, unless others may need the blocks; the tokens that it holds then."""
    assert sequence.row is not None
    block_size = group.tokens_per_block
    while len(sequence.table) * block_size < num_tokens and group.blocks.num_available > len(group.active):
        plan.block_rows.append(sequence.row)
        plan.block_ids.append(group.tables.grow(sequence))
        group.set_checkpoint(sequence)
    return len(sequence.table) * block_size
