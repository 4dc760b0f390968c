"""The rows of a batch and the inputs of steps, with expected values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_worker.batch.input_batch import InputBatch, PreparedStep
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import Fork, NewSequence, Step
from gpu_worker.lora.rows import RowAdapters
from midstream.errors import ExecutionError, UnsupportedError
from tests.gpu_worker.adapters import no_adapters
from tests.gpu_worker.tiny_models import ints

ARRAYS = {"context_rows", "context_starts", "context_lengths", "generation_rows"} | {
    "idle_rows",
    "released_rows",
    "block_rows",
    "block_ids",
}


@pytest.fixture
def batch() -> InputBatch:
    """Return a batch with blocks of 4 tokens: row 2 has tokens 10..15 in blocks 7 and 3, row 0 has 20..22 in
    block 5.
    """
    rows = Rows(num_rows=4, max_sequence_length=16, tokens_per_block=4, num_blocks=10, vocab_size=100)
    made = InputBatch(rows, tokens_per_block=4, adapters=RowAdapters(no_adapters(), vocab_size=100, hidden_size=2))
    made.prepare(Step(new_sequences=(sequence(2, [10, 11, 12, 13, 14, 15], [7, 3]), sequence(0, [20, 21, 22], [5]))))
    return made


def sequence(row: int, tokens: list[int], blocks: list[int], **fields: Any) -> NewSequence:
    return NewSequence(row=row, token_ids=ints(tokens), num_prompt_tokens=len(tokens), block_ids=ints(blocks), **fields)


def prepare(batch: InputBatch, **fields: Any) -> PreparedStep:
    arguments: dict[str, Any] = {key: ints(value) if key in ARRAYS else value for key, value in fields.items()}
    return batch.prepare(Step(**arguments))


def inputs_of(prepared: PreparedStep) -> dict[str, Any]:
    assert prepared.inputs is not None
    names = ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "sampled")
    return {name: getattr(prepared.inputs, name).tolist() for name in names}


def test_a_prefill_and_a_decode_are_flattened_into_one_pass(batch: InputBatch) -> None:
    prepared = prepare(batch, context_rows=[2], context_starts=[3], context_lengths=[3], generation_rows=[0])
    assert inputs_of(prepared) == {
        "token_ids": [13, 14, 15, 22],
        "positions": [3, 4, 5, 2],
        "slot_mapping": [31, 12, 13, 22],
        "query_starts": [0, 3, 4],
        "context_lens": [6, 3],
        "block_tables": [[7, 3], [5, 0]],
        "sampled": [2, 3],
    }
    assert prepared.sampled_rows.tolist() == [2, 0]


def test_decodes_alone(batch: InputBatch) -> None:
    prepared = prepare(batch, generation_rows=[2, 0])
    assert inputs_of(prepared) == {
        "token_ids": [22, 15],
        "positions": [2, 5],
        "slot_mapping": [22, 13],
        "query_starts": [0, 1, 2],
        "context_lens": [3, 6],
        "block_tables": [[5, 0], [7, 3]],
        "sampled": [0, 1],
    }
    assert prepared.sampled_rows.tolist() == [0, 2]


def test_a_chunk_samples_only_at_the_last_known_token(batch: InputBatch) -> None:
    assert prepare(batch, context_rows=[2], context_starts=[0], context_lengths=[5]).sampled_rows.tolist() == []
    prepared = prepare(
        batch,
        context_rows=[0, 2],
        context_starts=[0, 5],
        context_lengths=[2, 1],
    )
    assert prepared.sampled_rows.tolist() == [2]
    assert inputs_of(prepared)["sampled"] == [2]


def test_the_next_generation_step_differs_by_ended_and_new_sequences(batch: InputBatch) -> None:
    def rows(**fields: Any) -> list[int]:
        return prepare(batch, **fields).sampled_rows.tolist()  # type: ignore[no-any-return]

    assert rows(generation_rows=[2]) == [2]
    assert rows(repeat_generation=True) == [2]
    assert rows(repeat_generation=True, generation_rows=[0]) == [0, 2]
    assert rows(repeat_generation=True, new_sequences=(sequence(3, [1], [9]),), generation_rows=[3]) == [0, 2, 3]
    assert rows(repeat_generation=True, idle_rows=[2]) == [0, 3]
    assert rows(repeat_generation=True, released_rows=[0], generation_rows=[2]) == [2, 3]
    assert rows(generation_rows=[3]) == [3]
    assert rows() == []
    assert rows(repeat_generation=True) == []


def test_a_released_row_can_be_filled_in_the_same_step(batch: InputBatch) -> None:
    prepare(batch, generation_rows=[0, 2])
    again = sequence(2, [1, 2], [8])
    prepared = prepare(
        batch,
        released_rows=[2],
        new_sequences=(again,),
        repeat_generation=True,
        context_rows=[2],
        context_starts=[0],
        context_lengths=[2],
    )
    assert prepared.sampled_rows.tolist() == [2, 0]
    assert inputs_of(prepared)["slot_mapping"] == [32, 33, 22]


def test_sampled_tokens_are_what_the_next_step_takes(batch: InputBatch) -> None:
    prepare(batch, generation_rows=[0, 2])
    batch.rows.append_tokens(ints([0, 2]), ints([55, 66]))
    found = inputs_of(prepare(batch, repeat_generation=True))
    assert (found["token_ids"], found["positions"], found["context_lens"]) == ([55, 66], [3, 6], [4, 7])


def test_block_tables_grow_more_than_once_a_step(batch: InputBatch) -> None:
    prepare(batch, block_rows=[0, 2, 0, 0], block_ids=[1, 2, 4, 6])
    assert batch.rows.block_tables[[0, 2]].tolist() == [[5, 1, 4, 6], [7, 3, 2, 0]]
    assert batch.rows.num_blocks[[0, 2]].tolist() == [4, 3]


def test_a_fork_copies_all_but_the_table_into_a_row_that_may_be_empty(batch: InputBatch) -> None:
    rows = batch.rows
    free = rows.num_rows
    prepare(
        batch, forks=(Fork(2, 0, ints([7, 9])), Fork(2, free, ints([8]))), beam_rows=ints([0]), beam_tokens=ints([4])
    )
    assert rows.lengths[[0, 2, free]].tolist() == [7, 6, 6]
    assert rows.num_blocks[[0, free]].tolist() == [2, 1]
    assert rows.tokens[0, :7].tolist() == [*rows.tokens[2, :6].tolist(), 4]
    assert rows.is_active[free]
    assert rows.sampling[free] is rows.sampling[2]
    assert (rows.block_tables[0, :2].tolist(), rows.block_tables[free, :1].tolist()) == ([7, 9], [8])


def test_rows_grow_when_a_higher_number_comes(batch: InputBatch) -> None:
    prepare(batch, new_sequences=(sequence(9, [1, 2, 3], [9]),))
    assert batch.rows.num_rows >= 10
    assert inputs_of(prepare(batch, generation_rows=[9, 2]))["token_ids"] == [15, 3]


def test_a_failed_row_keeps_its_position_in_the_result(batch: InputBatch) -> None:
    failed = sequence(1, [1, 2], [9], error=UnsupportedError("no"))
    prepared = prepare(
        batch,
        new_sequences=(failed,),
        context_rows=[1, 2],
        context_starts=[0, 0],
        context_lengths=[2, 6],
        generation_rows=[0],
    )
    assert prepared.sampled_rows.tolist() == [1, 2, 0]
    assert prepared.is_run.tolist() == [False, True, True]
    assert inputs_of(prepared)["query_starts"] == [0, 6, 7]
    only_failed = prepare(batch, generation_rows=[1])
    assert (only_failed.inputs, only_failed.sampled_rows.tolist()) == (None, [1])


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_rows": [1]},
        {"generation_rows": [4]},
        {"released_rows": [3]},
        {"block_rows": [1], "block_ids": [0]},
        {"block_rows": [0], "block_ids": [10]},
        {"block_rows": [0] * 4, "block_ids": [0] * 4},
        {"context_rows": [0], "context_starts": [1], "context_lengths": [3]},
        {"context_rows": [0], "context_starts": [0], "context_lengths": [0]},
        {"forks": (Fork(1, 0, ints([])),)},
        {"new_sequences": (sequence(1, [1] * 5, [9]),), "generation_rows": [1]},
    ],
    ids=str,
)
def test_a_step_that_contradicts_the_rows_is_an_error(batch: InputBatch, fields: dict[str, Any]) -> None:
    with pytest.raises(ExecutionError):
        prepare(batch, **fields)


@pytest.mark.parametrize(
    "new",
    [
        sequence(1, [], []),
        sequence(1, [100], [9]),
        sequence(1, [-1], [9]),
        sequence(1, [1] * 17, [9]),
        sequence(1, [1], [10]),
        sequence(1, [1], [1] * 5),
    ],
    ids=["empty", "token too high", "token negative", "too long", "block outside", "long table"],
)
def test_a_sequence_out_of_range_fails_alone(batch: InputBatch, new: NewSequence) -> None:
    prepared = prepare(batch, new_sequences=(new,), generation_rows=[0, 1])
    assert prepared.is_run.tolist() == [True, False]
    assert 1 in batch.rows.failed
    prepare(batch, released_rows=[1], new_sequences=(sequence(1, [1], [9]),))
    assert not batch.rows.failed


def test_clear_forgets_everything(batch: InputBatch) -> None:
    prepare(batch, generation_rows=[0, 2])
    batch.clear()
    assert not batch.rows.is_active.any()
    assert prepare(batch, repeat_generation=True).sampled_rows.tolist() == []


def test_a_full_sequence_overwrites_its_last_position() -> None:
    rows = Rows(num_rows=1, max_sequence_length=4, tokens_per_block=4, num_blocks=1, vocab_size=100)
    rows.add(sequence(0, [1, 2, 3], [0]))
    for token in (4, 5):
        rows.append_tokens(ints([0]), ints([token]))
    assert rows.lengths.tolist() == [4]
    assert np.array_equal(rows.tokens[0], [1, 2, 3, 5])
