"""Stop words in the text of beams, with a byte-level vocabulary whose tokens are single letters and a few words."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import BeamStop, Fork, NewSequence, SamplingParams
from gpu_worker.sampling import beam_stops
from gpu_worker.sampling.beam_stops import BeamStops
from gpu_worker.sampling.beams import Candidates
from midstream.errors import ConfigError
from midstream.text.incremental import ByteLevelFactory, DecoderFactory
from midstream.text.sequence import SequenceText

WORDS: list[str] = ["<s>", *"abcdef", "bc", "xéy"]
A, B, C, D, E, F, BC, LONG = range(1, 9)


class Vocabulary:
    """A tokenizer with the tokens WORDS, of which the first is special."""

    vocab_size = len(WORDS)
    special_ids = frozenset({0})

    def token(self, token_id: int) -> str:
        """Return the token in GPT-2's byte alphabet, in which é is Ã©."""
        return str(WORDS[token_id]).replace("é", "Ã©")


def factory() -> DecoderFactory:
    return ByteLevelFactory(cast("Any", Vocabulary()))


def rows_of(stop: BeamStop | None, prompt: list[int], output: list[int], end_ids: tuple[int, ...] = ()) -> Rows:
    rows = Rows(4, 64, 4, 64, len(WORDS))
    sampling = SamplingParams(beam_width=2, beam_stop=stop, end_ids=end_ids)
    tokens = np.array([*prompt, *output], dtype=np.int32)
    blocks = np.arange(8, dtype=np.int32)
    rows.add(NewSequence(row=0, token_ids=tokens, num_prompt_tokens=len(prompt), block_ids=blocks, sampling=sampling))
    return rows


def found(rows: Rows, token_ids: tuple[int, ...], stops: BeamStops | None = None, row: int = 0) -> tuple[int, ...]:
    candidates = {0: Candidates(token_ids, (-1.0,) * len(token_ids))}
    items, errors = (stops or BeamStops(rows, factory)).find(np.array([row], dtype=np.int32), candidates)
    assert not errors
    return items[0].stop_words


@pytest.mark.parametrize(
    ("stop", "prompt", "output", "token_ids", "expected"),
    [
        (BeamStop(words=("cd", "bc")), [A], [B], (C, D, BC), (2, 0, 2)),
        (BeamStop(words=("abcd",)), [A], [A, BC], (C, D, BC), (0, 1, 0)),
        (BeamStop(words=("é",)), [A], [B], (A, LONG), (0, 1)),
        # Of words that end at the same character, the longest counts; the first to end counts otherwise.
        (BeamStop(words=("c", "bc", "b")), [A], [A], (BC, C), (3, 1)),
        (BeamStop(words=("c", "bc")), [A], [B], (C,), (2,)),
        # A stop word does not begin in the prompt, even if the output begins with it.
        (BeamStop(words=("ab",)), [A], [], (B,), ()),
        (BeamStop(words=("ab",), follows_prompt=True), [A], [], (B,), ()),
        # Special tokens have no text, unless they are shown.
        (BeamStop(words=("ab",)), [A], [A, 0], (B,), (1,)),
        (BeamStop(words=("ab", "<s>"), skip_special_tokens=False), [A], [A], (0, B), (2, 1)),
        (BeamStop(words=("b",), min_tokens=3), [A], [A], (B,), ()),
        (BeamStop(words=("b",), min_tokens=3), [A], [A, B], (B, C), (1, 0)),
    ],
)
def test_candidates_complete_stop_words(
    stop: BeamStop, prompt: list[int], output: list[int], token_ids: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert found(rows_of(stop, prompt, output), token_ids) == expected


def test_the_text_of_a_beam_is_continued_in_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = BeamStop(words=("abc",))
    rows = rows_of(stop, [A], [A])
    num_made = 0

    class Counted(SequenceText):
        def __init__(self, *args: Any) -> None:
            nonlocal num_made
            num_made += 1
            super().__init__(*args)

    monkeypatch.setattr(beam_stops, "SequenceText", Counted)
    stops = BeamStops(rows, factory)
    assert found(rows, (B, BC), stops) == (0, 1)
    rows.fork((Fork(0, 1, np.arange(8, 16, dtype=np.int32)),))
    rows.append_tokens(np.array([0, 1]), np.array([B, A], dtype=np.int32))
    assert found(rows, (C,), stops) == (1,)
    assert found(rows, (BC,), stops, row=1) == (1,)
    assert num_made == 1
    # As after a recovery: the same text is computed from all tokens.
    assert found(rows, (BC,), BeamStops(rows, factory), row=1) == (1,)
    assert num_made == 2


def test_only_rows_with_stop_words_fail_without_a_tokenizer() -> None:
    def load() -> DecoderFactory:
        raise ConfigError("tokenizer.json is missing", field="model")

    candidates = {0: Candidates((B,), (-1.0,))}
    place = np.array([0], dtype=np.int32)
    rows = rows_of(BeamStop(words=("b",)), [A], [])
    items, errors = BeamStops(rows, load).find(place, candidates)
    assert items == {}
    assert [(row, error.field) for row, error in errors] == [(0, "stopping.stop_words")]
    assert "tokenizer.json is missing" in str(errors[0][1])
    assert BeamStops(rows_of(None, [A], []), load).find(place, candidates) == (candidates, [])
