"""Extra outputs of a beam search."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.extras import CONTEXT
from protos import generation_pb2, worker_pb2
from scheduler.core.beams import Beam, BeamStep
from scheduler.core.request import ExtraOutput, Request, Sequence


def report_beams(request: Request, num_reported: int) -> None:
    """Attach the extra outputs of new output tokens to the sequences, after a search's step.

    A worker does not know which of its candidates will be part of an output, so its reports for each beam and step are
    collected here, along the path of the output. The log probabilities of the tokens come from the search itself.

    Args:
        request: A request with a beam search.
        num_reported: Number of tokens of the best output whose extra outputs were attached after earlier steps.
    """
    if request.beams is None:
        return
    search, best = request.beams.search, request.sequences[0]
    wants_log_probs = request.spec.wants_log_probs
    has_new = len(best.output) > num_reported or search.is_over
    reported = search.steps if search.is_over else search.steps[num_reported:]
    if not has_new or not (wants_log_probs or any(step.reports for step in reported)):
        return
    if not num_reported:
        # The end of the prompt was computed in the first step, when there was only one beam.
        rows = _rows_of(search.steps[0], 0)
        best.outputs.extend(ExtraOutput(0, row.SerializeToString()) for row in rows if _is_of_prompt(row))
    _report(best, search.decided, search.steps, range(num_reported, len(best.output)), wants_log_probs)
    if search.is_over:
        for sequence, item in zip(request.sequences[1:], search.ended[1:], strict=False):
            _report(sequence, item.beam, search.steps, range(len(sequence.output)), wants_log_probs)


def _report(sequence: Sequence, beam: Beam, steps: list[BeamStep], new: range, wants_log_probs: bool) -> None:
    """Attach the extra outputs of a sequence's tokens at the offsets `new`; the tokens are those of `beam`."""
    log_probs = generation_pb2.LogProbs()
    for offset in new:
        step, place = steps[offset], beam.places[offset]
        for row in _rows_of(step, step.parents[place]):
            if row.tensors and not _is_of_prompt(row):
                sequence.outputs.append(ExtraOutput(offset, row.SerializeToString()))
            elif row.HasField("log_probs"):
                log_probs.top_k = row.log_probs.top_k
                log_probs.top_token_ids.extend(row.log_probs.top_token_ids)
                log_probs.top_log_probs.extend(row.log_probs.top_log_probs)
        if step.token_ranks:
            log_probs.token_ranks.append(step.token_ranks[place])
    if wants_log_probs and new:
        log_probs.token_log_probs.extend(beam.log_probs[new.start : new.stop])
        data = worker_pb2.RowOutputs(log_probs=log_probs).SerializeToString()
        sequence.outputs.append(ExtraOutput(new.start, data))


def _rows_of(step: BeamStep, rank: int) -> Iterator[worker_pb2.RowOutputs]:
    """Yield the worker's reports for the beam that had this rank before the step."""
    for data in step.reports[rank] if rank < len(step.reports) else ():
        yield worker_pb2.RowOutputs.FromString(data)


def _is_of_prompt(row: worker_pb2.RowOutputs) -> bool:
    return row.HasField("prompt_log_probs") or any(tensor.name.startswith(CONTEXT) for tensor in row.tensors)
