"""What the outputs of a beam search report beside their tokens."""

from __future__ import annotations

from protos import generation_pb2, worker_pb2
from scheduler.core.request import ExtraOutput, Request


def report_beams(request: Request) -> None:
    """Gives the outputs of a search, once it is over, the log probabilities of their tokens, where these are asked for.

    They are what the search summed up: a worker does not know which of its candidates became an output.
    """
    if request.beams is None or not request.beams.search.is_over:
        return
    contents = generation_pb2.GenerateRequest.FromString(request.spec.payload)
    if not contents.output.HasField("log_probs"):
        return
    for sequence, item in zip(request.sequences, request.beams.search.ended, strict=False):
        row = worker_pb2.RowOutputs()
        row.log_probs.token_log_probs.extend(item.beam.log_probs)
        sequence.outputs.append(ExtraOutput(0, row.SerializeToString()))
