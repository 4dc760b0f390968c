"""Beam search of one request: which beams continue, which have ended, and when the search is over.

A step takes the candidates of all running beams, keeps those with the best cumulative log probabilities, and is
recorded as a `BeamStep`. The state is a function of the request and its steps in order, so the journal keeps the steps.
Ties between candidates are broken by the rank of their beam and then by token id, so candidates determine the step.

Scores and the end of the search are defined as in transformers and TensorRT-LLM: of the `width` best candidates, the
ones that end their beam are added to the ended beams, with their scores, and the best `width` ended beams are kept.

A diversity rate, which only TensorRT-LLM has, is used as in its kernel (beamSearchKernelsTemplate.h): the rate times
the rank of a beam is added to the scores of its candidates, including the score of a candidate that ends its beam, and
the best candidate of a step, whether it ends or not, decides whether the search is over. The last step is like the
others; then the running beams end with their scores, without the rate, unless the search was over.

The common prefix of all beams that may still become the best one is *decided*: whatever happens later, the best output
begins with it. Log probabilities are at most 0, so a running beam can never score better than its present cumulative
log probability, plus the rate times the last rank, at the most favorable length.

A beam also ends with the token that completes a stop word. The worker, which has the text, reports these tokens with
the candidates, and they are a part of the step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as TypingSequence
from typing import TYPE_CHECKING

from midstream.record import record

if TYPE_CHECKING:
    from scheduler.core.request_spec import RequestSpec

STOP_WHEN_FULL = 1  # early_stopping: stop as soon as `width` beams have ended
STOP_BY_PRESENT_LENGTH = 0  # stop when the best running beam now scores no better than the worst ended one

_MAX_EXPONENT = 600.0
# Generous bound on the relative rounding error of scores.
_ROUNDING = 1e-9

# A candidate for the next token, and its log probability.
Candidate = tuple[int, float]


@record
class BeamStep:
    """One step: entry i extends the beam of rank parents[i] by token_ids[i]. The best entries come first.

    Attributes:
        token_ranks: Rank of each token among its parent's possible next tokens, from 1.
        reports: Extra outputs of the worker for each beam before the step: serialized RowOutputs by the beam's rank.
            Empty if there were none.
        stop_words: The stop word that each token completes, as its index in the request's stop words plus one, and 0
            for none; empty if there were none.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    token_ranks: tuple[int, ...] = ()
    reports: tuple[tuple[bytes, ...], ...] = ()
    stop_words: tuple[int, ...] = ()


@record
class Beam:
    """Output tokens (array type 'I') with their log probabilities (array type 'f'), and the sum of the log
    probabilities.

    Attributes:
        places: For each token, the index of the step's entry that appended it (array type 'I').
    """

    tokens: array[int]
    log_probs: array[float]
    places: array[int]
    cumulative: float = 0.0

    def extended(self, token: int, log_prob: float, place: int) -> Beam:
        tokens, log_probs, places = self.tokens[:], self.log_probs[:], self.places[:]
        tokens.append(token)
        log_probs.append(log_prob)
        places.append(place)
        return Beam(tokens, log_probs, places, self.cumulative + log_prob)


@record
class EndedBeam:
    """A beam that ended with a stop token, a stop sequence or a stop word, or else at its maximum length."""

    score: float
    beam: Beam
    is_stopped: bool
    stop_token_id: int | None
    stop_word: str = ""


class BeamSearch:
    """The state of one search.

    Attributes:
        spec: The request.
        steps: The steps so far.
        running: Running beams, best first; initially a single beam without tokens.
        ended: The best ended beams, best first.
        is_over: Whether the search has finished.
        decided: A beam that begins with the decided tokens.
        num_decided: Number of decided tokens.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self.steps: list[BeamStep] = []
        self.running = [Beam(array("I"), array("f"), array("I"))]
        self.ended: list[EndedBeam] = []
        self.is_over = False
        self.decided, self.num_decided = self.running[0], 0
        self.spec = spec

    @classmethod
    def restored(cls, spec: RequestSpec, steps: TypingSequence[BeamStep]) -> BeamSearch:
        """Return the search after these steps."""
        search = cls(spec)
        for step in steps[:-1]:
            search._extend(step)
        # Decided tokens stay decided, so it suffices to decide after the last step. A step that leaves no beams decides
        # nothing, however, so decide before the last step too.
        search._decide()
        for step in steps[-1:]:
            search.apply(step)
        return search

    @property
    def num_candidates(self) -> int:
        """Return the number of candidates needed per beam: enough even if all stop tokens are among the most likely
        tokens. Any number of tokens may complete a stop word or sequence, so with these a step considers a fixed number
        of candidates, which may all be those of one beam.
        """
        spec = self.spec
        has_words = spec.stop_words or spec.stop_sequences
        return self._num_considered if has_words else spec.beam_width + len(spec.stop_token_ids)

    @property
    def _num_considered(self) -> int:
        """Return the number of candidates, of all beams, that a step considers."""
        return max(2, 1 + len(self.spec.stop_token_ids)) * self.spec.beam_width

    def choose(
        self,
        candidates: TypingSequence[TypingSequence[Candidate]],
        reports: tuple[tuple[bytes, ...], ...] = (),
        stop_words: TypingSequence[Mapping[int, int]] = (),
    ) -> BeamStep:
        """Return the next step without changing any state.

        Args:
            candidates: Candidates of each running beam.
            reports: As in BeamStep.
            stop_words: For each running beam, the stop words that its candidates complete, by token, as in BeamStep;
                empty if there are none.
        """
        width, rate = self.spec.beam_width, self.spec.beam_diversity_rate
        ordered = sorted(
            (-(beam.cumulative + log_prob + rate * rank), rank, token, log_prob)
            for rank, (beam, row) in enumerate(zip(self.running, candidates, strict=True))
            for token, log_prob in row
        )
        kept: list[tuple[int, int, float, int, int]] = []
        num_running = 0
        for place, (_, rank, token, log_prob) in enumerate(ordered[: self._num_considered]):
            if num_running == width or (place >= width and self._ends_all):
                break
            stop_word = stop_words[rank].get(token, 0) if stop_words else 0
            if not (self._ends_all or self._is_stopped(self.running[rank].tokens, token, stop_word)):
                num_running += 1
            elif place >= width:
                continue
            token_rank = 1 + sum(other > log_prob for _, other in candidates[rank])
            kept.append((rank, token, log_prob, token_rank, stop_word))
        parents, tokens, log_probs, token_ranks, words = zip(*kept, strict=True) if kept else ((),) * 5
        return BeamStep(parents, tokens, log_probs, token_ranks, reports, words if any(words) else ())

    def apply(self, step: BeamStep) -> list[int]:
        """Apply a step.

        Returns:
            For each running beam, the previous rank of the beam or of its parent.
        """
        parents = self._extend(step)
        self._decide()
        return parents

    def _extend(self, step: BeamStep) -> list[int]:
        """Apply a step as `apply` does, but do not update the decided tokens."""
        before, self.running = self.running, []
        parents: list[int] = []
        is_last, ends_all, best = self._is_last_step, self._ends_all, -math.inf
        words = step.stop_words or (0,) * len(step.parents)
        entries = zip(step.parents, step.token_ids, step.log_probs, words, strict=True)
        for place, (rank, token, log_prob, word) in enumerate(entries):
            beam = before[rank].extended(token, log_prob, place)
            value = beam.cumulative + self.spec.beam_diversity_rate * rank
            best = max(best, value)
            is_stopped = self._is_stopped(before[rank].tokens, token, word)
            if is_stopped or ends_all:
                score, stop_id = self._score(value, len(beam.tokens)), self._stop_id(token)
                stop_word = self.spec.stop_words[word - 1] if word and stop_id is None else ""
                self.ended.append(EndedBeam(score, beam, is_stopped, stop_id, stop_word))
            else:
                self.running.append(beam)
                parents.append(rank)
        self._keep_best()
        self.steps.append(step)
        if self.running and not self.spec.beam_diversity_rate:
            best = self.running[0].cumulative
        self.is_over = not self.running or self._is_over(best)
        if is_last and self.running:
            self._end_running()
            return []
        return parents

    def _end_running(self) -> None:
        """End the running beams after the last step; if the search was over already, they are dropped."""
        if not self.is_over:
            for beam in self.running:
                self.ended.append(EndedBeam(self._score(beam.cumulative, len(beam.tokens)), beam, False, None))
            self._keep_best()
        self.running, self.is_over = [], True

    def _keep_best(self) -> None:
        """Keep the best `width` ended beams."""
        self.ended.sort(key=lambda item: -item.score)
        del self.ended[self.spec.beam_width :]

    def _decide(self) -> None:
        """Update the number of decided tokens of the best output."""
        beams = [item.beam for item in self.ended[:1]]
        if not self.is_over:
            beams += [beam for beam in self.running if self._can_be_best(beam)]
        if beams:
            # All these beams begin with the decided tokens, so only later tokens are compared. The common prefix of the
            # lexically first and last beams is common to all.
            tails = [beam.tokens[self.num_decided :] for beam in beams]
            self.decided, self.num_decided = beams[0], self.num_decided + _num_common(min(tails), max(tails))

    def _can_be_best(self, beam: Beam) -> bool:
        """Return whether a running beam may still end with a better score than the best ended one."""
        if not self.ended:
            return True
        spec, best = self.spec, self.ended[0].score
        value = beam.cumulative + spec.beam_diversity_rate * (spec.beam_width - 1)
        # A score is a monotonic function of the length. If the beam ends without a stop, the rate does not count.
        bounds = [self._score(item, length) for item in (value, beam.cumulative) for length in self._possible_lengths]
        return max(bounds) > best - _ROUNDING * abs(best)

    @property
    def _possible_lengths(self) -> tuple[int, int]:
        """Return the least and greatest length with which a running beam may end."""
        return len(self.steps) + 1, max(self.spec.max_tokens, len(self.steps) + 1)

    @property
    def _is_last_step(self) -> bool:
        return len(self.steps) + 1 >= self.spec.max_tokens

    @property
    def _ends_all(self) -> bool:
        """Whether all candidates of the next step end their beams."""
        return self._is_last_step and not self.spec.beam_diversity_rate

    def _is_stopped(self, tokens: array[int], token: int, stop_word: int) -> bool:
        """Return whether a beam with these tokens ends with the next one, whatever its length."""
        if stop_word > 0 or self._stop_id(token) is not None:
            return True
        spec = self.spec
        if len(tokens) + 1 < spec.min_tokens or all(sequence[-1] != token for sequence in spec.stop_sequences):
            return False
        return spec.ends_with_stop_sequence(tokens + array("I", (token,)))

    def _stop_id(self, token: int) -> int | None:
        is_stop = token in self.spec.stop_token_ids and len(self.steps) + 1 >= self.spec.min_tokens
        return token if is_stop else None

    def _score(self, cumulative: float, length: int) -> float:
        # The length penalty is unbounded, so the power may overflow a float.
        exponent = -self.spec.length_penalty * math.log(length)
        return cumulative * math.exp(max(-_MAX_EXPONENT, min(_MAX_EXPONENT, exponent)))

    def _is_over(self, best: float) -> bool:
        """Return whether the search is over although beams are running, of which the best one has the value `best`."""
        spec = self.spec
        if len(self.ended) < spec.beam_width:
            return False
        if spec.early_stopping == STOP_WHEN_FULL:
            return True
        length = len(self.steps)
        if spec.early_stopping != STOP_BY_PRESENT_LENGTH and spec.length_penalty > 0:
            length = spec.max_tokens
        return self._score(best, length) <= self.ended[-1].score


def _num_common(one: array[int], other: array[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
