"""Sends tables of virtual tokens in parts, since several tables in a step may exceed the message size limit."""

from __future__ import annotations

from collections.abc import Iterator

from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.effects import StepPlan

PART_BYTES = 4 << 20


def table_parts(plan: StepPlan) -> Iterator[bytes]:
    """Yield serialized SchedulerMessages with the tables of all sequences that a step adds; each table is sent once."""
    sent = set()
    for added in plan.added:
        spec = added.sequence.request.spec
        if not spec.num_virtual_tokens or spec.prompt_key in sent:
            continue
        sent.add(spec.prompt_key)
        tuning = pb.GenerateRequest.FromString(spec.payload).prompt_tuning
        if tuning.HasField("table"):
            yield from _parts(tuning.table, spec.prompt_key, plan.epoch)


def _parts(table: pb.Tensor, key: str, epoch: int) -> Iterator[bytes]:
    for start in range(0, len(table.data), PART_BYTES):
        end = min(start + PART_BYTES, len(table.data))
        message = worker_pb2.SchedulerMessage()
        part = message.prompt_table
        part.epoch, part.key = epoch, key
        part.tensor.dtype, part.tensor.data_offset = table.dtype, start
        part.tensor.shape.extend(table.shape)
        part.tensor.data, part.tensor.is_last = table.data[start:end], end == len(table.data)
        yield message.SerializeToString()
