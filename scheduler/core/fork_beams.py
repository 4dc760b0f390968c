"""Writes into a step what a beam search decided after its last one: which rows fork, and the token that each takes."""

from __future__ import annotations

from scheduler.core.effects import Fork, StepPlan
from scheduler.core.request import Request
from scheduler.core.worker_group import WorkerGroup


def fork_beams(group: WorkerGroup, request: Request, plan: StepPlan) -> bool:
    """Carries out the forks of a beam search on the group and in the plan.

    Args:
        group: Where the request runs.
        request: A beam search with news.
        plan: The next step.

    Returns:
        False, and nothing is changed, when there are not enough blocks.
    """
    beams, tables = request.beams, group.tables
    assert beams is not None
    if tables.num_missing_for_forks(beams.forks) > group.blocks.num_available:
        return False
    for source_block, target_block in tables.fork(beams.forks):
        plan.copy_source_blocks.append(source_block)
        plan.copy_target_blocks.append(target_block)
    for source, target in beams.forks:
        assert source.row is not None
        assert target.row is not None
        plan.forks.append(Fork(source.row, target.row, tuple(target.table)))
        if not target.is_on_worker:
            target.is_on_worker = True
            group.num_on_worker += 1
        group.set_checkpoint(target)
    for lane in beams.spare:
        if lane.table:
            tables.empty(lane)
    for lane in beams.running:
        assert lane.row is not None
        plan.beam_rows.append(lane.row)
        plan.beam_token_ids.append(lane.output[-1])
    beams.forks.clear()
    beams.has_news = False
    return True
