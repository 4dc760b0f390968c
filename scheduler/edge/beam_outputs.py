"""Extra outputs of a finished beam search."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.extras import CONTEXT
from protos import generation_pb2, worker_pb2
from scheduler.core.beams import Beam, BeamStep
from scheduler.core.request import ExtraOutput, Request


def report_beams(request: Request) -> None:
    """Attach extra outputs to the output sequences of a finished search.

    A worker does not know which of its candidates becomes an output, so its reports for each beam and step are
    collected here, along the path of the output. Log probabilities are those that the search summed up.
    """
    if request.beams is None or not request.beams.search.is_over:
        return
    search = request.beams.search
    wants_log_probs = generation_pb2.GenerateRequest.FromString(request.spec.payload).output.HasField("log_probs")
    if not wants_log_probs and not any(step.reports for step in search.steps):
        return
    steps = [_parsed(step) for step in search.steps]
    if steps:
        # The prompt's end was computed with the first step, in which there was one beam.
        request.sequences[0].outputs.extend(ExtraOutput(0, row.SerializeToString()) for row in _of_prompt(steps[0]))
    for sequence, item in zip(request.sequences, search.ended, strict=False):
        log_probs = worker_pb2.RowOutputs()
        for offset, rows in enumerate(_way(item.beam, search.steps, steps)):
            for row in rows:
                if row.tensors and not _is_of_prompt(row):
                    sequence.outputs.append(ExtraOutput(offset, row.SerializeToString()))
                elif row.HasField("log_probs"):
                    log_probs.log_probs.top_k = row.log_probs.top_k
                    log_probs.log_probs.top_token_ids.extend(row.log_probs.top_token_ids)
                    log_probs.log_probs.top_log_probs.extend(row.log_probs.top_log_probs)
        if wants_log_probs:
            log_probs.log_probs.token_log_probs.extend(item.beam.log_probs)
            log_probs.log_probs.token_ranks.extend(_ranks(item.beam, search.steps))
            sequence.outputs.append(ExtraOutput(0, log_probs.SerializeToString()))


_Rows = list[worker_pb2.RowOutputs]


def _parsed(step: BeamStep) -> list[_Rows]:
    return [[worker_pb2.RowOutputs.FromString(data) for data in reports] for reports in step.reports]


def _way(beam: Beam, steps: list[BeamStep], parsed: list[list[_Rows]]) -> Iterator[_Rows]:
    """Yield the extra outputs that were reported for each of a beam's tokens."""
    for place, step, rows in zip(beam.places, steps, parsed, strict=False):
        rank = step.parents[place]
        yield rows[rank] if rank < len(rows) else []


def _ranks(beam: Beam, steps: list[BeamStep]) -> Iterator[int]:
    for place, step in zip(beam.places, steps, strict=False):
        if step.token_ranks:
            yield step.token_ranks[place]


def _of_prompt(rows: list[_Rows]) -> Iterator[worker_pb2.RowOutputs]:
    return (row for of_beam in rows for row in of_beam if _is_of_prompt(row))


def _is_of_prompt(row: worker_pb2.RowOutputs) -> bool:
    return row.HasField("prompt_log_probs") or any(tensor.name.startswith(CONTEXT) for tensor in row.tensors)
