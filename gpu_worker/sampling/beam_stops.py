"""Finds the stop words that the candidates of beams complete.

The text of a beam is made as the detokenizer makes it, so that both find a stop word at the same token. It is a
function of the beam's tokens. The scheduler chooses a beam's next token, and may continue one beam in several rows, so
the text states of recent beams are kept by their tokens; a state that is missing, as after a recovery, is computed
again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import BeamStop, IntArray, SamplingParams
from gpu_worker.sampling.beams import Candidates
from midstream.errors import MidstreamError, UnsupportedError
from midstream.text.incremental import DecoderFactory
from midstream.text.sequence import SequenceText, TextRules

_MAX_STATES = 4096


class BeamStops:
    """The text states of recent beams. Not thread-safe."""

    def __init__(self, rows: Rows, load: Callable[[], DecoderFactory]) -> None:
        """`load` loads the model's tokenizer; it is called when a tokenizer is first needed."""
        self._rows = rows
        self._load = load
        self._decoders: DecoderFactory | None = None
        self._texts: OrderedDict[bytes, SequenceText] = OrderedDict()

    def find(
        self, rows: IntArray, candidates: dict[int, Candidates]
    ) -> tuple[dict[int, Candidates], list[tuple[int, MidstreamError]]]:
        """Return the candidates of beams with the stop words that they complete, and the errors of rows whose text
        cannot be made.

        Args:
            candidates: Candidates without stop words, by place in `rows`.
        """
        found: dict[int, Candidates] = {}
        errors: list[tuple[int, MidstreamError]] = []
        for place, item in candidates.items():
            row = int(rows[place])
            sampling = self._rows.sampling[row]
            if sampling.beam_stop is None or not sampling.beam_stop.words:
                found[place] = item
                continue
            try:
                text = self._text(row, sampling, sampling.beam_stop)
            except MidstreamError as error:
                message = f"the worker cannot make the text of beams: {error.message}"
                errors.append((row, UnsupportedError(message, field="stopping.stop_words")))
                continue
            found[place] = replace(item, stop_words=_completed(text, sampling.beam_stop, item.token_ids))
        return found, errors

    def _text(self, row: int, sampling: SamplingParams, stop: BeamStop) -> SequenceText:
        """Return the text of the row's output so far."""
        num_prompt = int(self._rows.prompt_lengths[row])
        known = self._rows.tokens[row, : self._rows.lengths[row]]
        prompt, output = known[: num_prompt if stop.follows_prompt else 0], known[num_prompt:]
        text_of = hashlib.blake2b(repr((stop, sampling.end_ids, len(prompt))).encode(), digest_size=16)
        text_of.update(prompt.tobytes())
        text_of.update(output[:-1].tobytes())
        before = text_of.digest()
        text_of.update(output[-1:].tobytes())
        text = self._texts.pop(text_of.digest(), None)
        if text is None and len(output) and before in self._texts:
            text = self._texts[before].copy()
            text.push(output[-1:].tolist())
        if text is None:
            text = SequenceText(_rules(stop, sampling.end_ids, tuple(prompt.tolist())), self._open())
            if len(output):
                text.push(output.tolist())
        self._texts[text_of.digest()] = text
        if len(self._texts) > _MAX_STATES:
            self._texts.popitem(last=False)
        return text

    def _open(self) -> DecoderFactory:
        if self._decoders is None:
            self._decoders = self._load()
        return self._decoders


def _rules(stop: BeamStop, stop_ids: tuple[int, ...], prompt: tuple[int, ...]) -> TextRules:
    return TextRules(
        stop_words=TextRules.words(stop.words),
        stop_ids=frozenset(stop_ids),
        min_tokens=stop.min_tokens,
        include_stop=stop.include_stop,
        skip_special_tokens=stop.skip_special_tokens,
        prompt_ids=prompt,
    )


def _completed(text: SequenceText, stop: BeamStop, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stop word that each token completes after `text`, as in StepResult."""
    numbers: list[int] = []
    for token_id in token_ids:
        longer = text.copy()
        longer.push([token_id])
        word = longer.stop_word
        numbers.append(0 if word is None else 1 + stop.words.index(word))
    return tuple(numbers) if any(numbers) else ()
