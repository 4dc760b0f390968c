"""Log probabilities and tensors are delivered exactly once, even if the feed repeats them; large tensors are split."""

from __future__ import annotations

from dataclasses import replace

from detokenizer.outputs import OutputCursor
from midstream.chunk import Chunk
from midstream.extras import Extras, LogProbs, Tensor, TensorCursor, join_tensors


def rows(*values: float, top_k: int = 1) -> LogProbs:
    count = len(values)
    return LogProbs(values, top_k, tuple(range(count * top_k)), tuple(values * top_k), (1,) * count)


def piece(start: int, end: int) -> Tensor:
    return Tensor("logits", "float32", (end - start, 1), bytes(range(4 * start, 4 * end)), 4 * start, end == 9)


def test_rows_that_come_again_are_dropped() -> None:
    cursor = OutputCursor()
    first, second = Extras(rows(-1.0, -2.0)), Extras(rows(-3.0))
    assert cursor.new(first, 0, 0, None) == first
    assert cursor.new(second, 2, 0, None) == second
    cursor.reopen()
    assert cursor.new(first, 0, 0, None) is None
    # The log probabilities are split differently than the first time; only the new row is delivered.
    again = cursor.new(Extras(rows(-3.0, -4.0)), 2, 0, None)
    assert again is not None
    assert again.log_probs is not None
    assert again.log_probs.token_log_probs == (-4.0,)
    assert cursor.cumulative_log_prob == -10.0


def test_rows_before_the_readers_offset_count_and_are_not_shown() -> None:
    cursor = OutputCursor()
    shown = cursor.new(Extras(rows(-1.0, -2.0, -3.0, top_k=2)), 0, 2, None)
    assert shown is not None
    assert shown.log_probs is not None
    assert shown.log_probs == rows(-1.0, -2.0, -3.0, top_k=2).without(2)
    assert shown.log_probs.token_log_probs == (-3.0,)
    assert len(shown.log_probs.top_token_ids) == 2
    assert cursor.cumulative_log_prob == -6.0


def test_rows_behind_a_stop_word_do_not_count() -> None:
    cursor = OutputCursor()
    shown = cursor.new(Extras(rows(-1.0, -2.0)), 0, 0, 1)
    assert shown == Extras(rows(-1.0, -2.0).first(1))
    assert cursor.new(Extras(rows(-3.0)), 2, 0, 1) is None
    assert cursor.cumulative_log_prob == -1.0


def test_tensors_end_with_the_sequence() -> None:
    """Tensors of tokens after a stop word are never sent, whether or not these tokens were computed."""
    prompt = replace(piece(0, 5), name="context_logits")
    assert OutputCursor().new(Extras(tensors=(prompt, piece(0, 4))), 0, 0, 3) == Extras(tensors=(prompt, piece(0, 3)))
    cursor = OutputCursor()
    assert cursor.new(Extras(tensors=(piece(2, 3),)), 2, 0, 2) is None
    assert OutputCursor().new(Extras(tensors=(piece(0, 2),)), 0, 0, 2) == Extras(tensors=(piece(0, 2),))


def test_the_prompts_rows_come_once_however_they_are_split() -> None:
    cursor = OutputCursor()
    assert cursor.new(Extras(prompt_log_probs=rows(-1.0, -2.0)), 0, 0, None) is not None
    cursor.reopen()
    assert cursor.new(Extras(prompt_log_probs=rows(-1.0)), 0, 0, None) is None
    rest = cursor.new(Extras(prompt_log_probs=rows(-2.0, -3.0)), 0, 0, None)
    assert rest is not None
    assert rest.prompt_log_probs == rows(-2.0, -3.0).without(1)
    resumed = OutputCursor()
    assert resumed.new(Extras(prompt_log_probs=rows(-1.0)), 0, 3, None) is None


def test_a_reader_drops_the_pieces_that_it_has() -> None:
    cursor = TensorCursor()
    assert cursor.new(Extras(tensors=(piece(0, 3), piece(3, 5)))) == Extras(tensors=(piece(0, 3), piece(3, 5)))
    assert cursor.new(Extras(tensors=(piece(0, 3),))) is None
    rest = cursor.new(Extras(tensors=(piece(0, 3), piece(3, 5), piece(5, 9))))
    assert rest == Extras(tensors=(piece(5, 9),))
    whole = join_tensors([piece(0, 3), piece(3, 5), piece(5, 9)])["logits"]
    assert whole == piece(0, 9)


def test_a_chunk_is_cut_before_its_end() -> None:
    tensors = tuple(piece(i, i + 1) for i in range(9))
    chunk = Chunk(
        0, 5, [1, 2], "ab", is_sequence_final=True, is_final=True, extras=Extras(rows(-1.0, -2.0), None, tensors)
    )
    pieces = list(chunk.pieces(12))
    assert [len(item.extras.tensors) for item in pieces if item.extras] == [3, 3, 3]
    assert [item.is_final for item in pieces] == [False, False, True]
    assert [list(item.token_ids) for item in pieces] == [[1, 2], [], []]
    assert all(item.adds_to(7) for item in pieces)
    whole = Chunk()
    whole.token_offset = 5
    for item in pieces:
        whole.append(item)
    assert (list(whole.token_ids), whole.text, whole.extras, whole.is_final) == ([1, 2], "ab", chunk.extras, True)
    (alone,) = Chunk(0, 0, [1], "a", extras=Extras(tensors=(piece(0, 9),))).pieces(1)
    assert alone.extras is not None
