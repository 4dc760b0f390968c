"""Every field of a step batch becomes the field of the step that it describes."""

import dataclasses

import numpy as np
import pytest
from google.protobuf import json_format

from gpu_worker.batch.step import Step
from gpu_worker.scheduler_link.messages import decode_step
from protos import worker_pb2

# The fields with another name in `Step`, and the fields that only KeptBlocks and KvTiers read, from the message itself.
RENAMED = {
    "add_sequences": "new_sequences",
    "beam_token_ids": "beam_tokens",
    "copy_source_blocks": "copy_sources",
    "copy_target_blocks": "copy_targets",
}
READ_ELSEWHERE = {
    "hashed_blocks",
    "block_hashes",
    "retained_hashes",
    "retained_priorities",
    "retained_ms",
    "ahead_hashes",
}
ARRAYS = [
    "released_rows",
    "block_rows",
    "block_ids",
    "copy_source_blocks",
    "copy_target_blocks",
    "context_rows",
    "context_starts",
    "context_lengths",
    "generation_rows",
    "idle_rows",
    "beam_rows",
    "beam_token_ids",
    "draft_rows",
    "draft_limits",
    "adopted_blocks",
    "adopted_hashes",
]


def test_an_empty_message_is_a_step_without_work() -> None:
    step = decode_step(worker_pb2.StepBatch(epoch=3, step_id=7))
    assert (step.epoch, step.step_id, step.repeat_generation, step.reports_digests) == (3, 7, False, False)
    assert all(
        len(getattr(step, item.name)) == 0
        for item in dataclasses.fields(Step)
        if item.name not in {"epoch", "step_id", "repeat_generation", "reports_digests"}
    )


def test_each_array_becomes_the_field_with_its_contents() -> None:
    message = worker_pb2.StepBatch(epoch=1, step_id=2, repeat_generation=True)
    for place, name in enumerate(ARRAYS):
        getattr(message, name).extend([place, 100 + place])
    step = decode_step(message)
    assert step.repeat_generation
    for place, name in enumerate(ARRAYS):
        values = getattr(step, RENAMED.get(name, name))
        assert values.tolist() == [place, 100 + place], name
        assert values.dtype == (np.uint64 if name == "adopted_hashes" else np.int32), name


def test_sequences_and_forks_are_decoded() -> None:
    message = worker_pb2.StepBatch(epoch=1, step_id=2)
    message.add_sequences.add(row=4, request_id="a", token_ids=[5, 6, 7], num_prompt_tokens=2, block_ids=[8])
    message.forks.add(from_row=4, to_row=9, block_ids=[8, 10])
    step = decode_step(message)
    (new,), (fork,) = step.new_sequences, step.forks
    assert (new.row, new.request_id, new.num_prompt_tokens) == (4, "a", 2)
    assert (new.token_ids.tolist(), new.block_ids.tolist()) == ([5, 6, 7], [8])
    assert (fork.from_row, fork.to_row, fork.block_ids.tolist()) == (4, 9, [8, 10])


def test_no_field_is_ignored() -> None:
    decoded = {RENAMED.get(item.name, item.name) for item in worker_pb2.StepBatch.DESCRIPTOR.fields} - READ_ELSEWHERE
    assert decoded == {item.name for item in dataclasses.fields(Step)}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"context_rows": [1], "context_starts": [0]}, "context arrays"),
        ({"block_rows": [1]}, "block arrays"),
        ({"copy_target_blocks": [1]}, "block arrays"),
        ({"beam_token_ids": [1]}, "beam or draft arrays"),
        ({"draft_rows": [1]}, "beam or draft arrays"),
        ({"adopted_hashes": [1]}, "adoption arrays"),
        ({"retained_ms": [1]}, "retention arrays"),
        ({"released_rows": [2**31]}, "int"),
    ],
)
def test_arrays_of_different_lengths_or_out_of_range_are_rejected(fields: dict[str, list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode_step(json_format.ParseDict(fields, worker_pb2.StepBatch()))
