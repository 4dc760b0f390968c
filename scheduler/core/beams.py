"""Beam search of one request: which beams go on, which have ended, when it is over.

A step takes the candidates of all beams that go on, keeps those with the best cumulative log probabilities, and is
noted as a `BeamStep`. The state is a function of the request and its steps in order, so these are what a journal keeps;
equal candidates are told apart by the rank of their beam and then by token id, so steps follow from candidates.

Scores, and when the search is over, are as in transformers' and TensorRT-LLM's: among the `width` best candidates those
that end are taken as ended, with their score; the best `width` of all ended ones are kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core.request_spec import RequestSpec

STOP_WHEN_FULL = 1  # early_stopping: as soon as `width` beams have ended
STOP_BY_PRESENT_LENGTH = 0  # when the best one that goes on scores no better, at its length, than the worst ended one

_MAX_EXPONENT = 600.0

# A token that may come next, and its log probability.
Candidate = tuple[int, float]


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One step: entry i extends the beam of rank parents[i] by token_ids[i]. In the order of preference.

    Attributes:
        token_ranks: Rank of each token among all that could follow its parent, from 1.
        reports: What the worker said beside the candidates of each beam before the step: serialized RowOutputs by the
            beam's rank. Empty where nothing was said.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    token_ranks: tuple[int, ...] = ()
    reports: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens (array type 'I') with their log probabilities (array type 'f') and the sum of these.

    Attributes:
        places: Of each token, the step's entry that appended it.
    """

    tokens: array[int]
    log_probs: array[float]
    cumulative: float = 0.0
    places: tuple[int, ...] = ()

    def extended(self, token: int, log_prob: float, place: int) -> Beam:
        """Return the beam with one token more."""
        tokens, log_probs = self.tokens[:], self.log_probs[:]
        tokens.append(token)
        log_probs.append(log_prob)
        return Beam(tokens, log_probs, self.cumulative + log_prob, (*self.places, place))


@dataclass(frozen=True, slots=True)
class EndedBeam:
    """A beam that came to its end: by a stop token, or else by its length."""

    score: float
    beam: Beam
    stop_token_id: int | None


class BeamSearch:
    """The state of one search.

    Attributes:
        spec: What was asked for.
        steps: What happened so far.
        running: Beams that go on, in the order of preference; at the beginning one without tokens.
        ended: The best that have ended, best first.
        is_over: Nothing more is to be done.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self.steps: list[BeamStep] = []
        self.running = [Beam(array("I"), array("f"))]
        self.ended: list[EndedBeam] = []
        self.is_over = False
        self.spec = spec

    @property
    def num_candidates(self) -> int:
        """Of each beam, as many as may be needed: all stop tokens may be among the likeliest."""
        return self.spec.beam_width + len(self.spec.stop_token_ids)

    def choose(
        self,
        candidates: TypingSequence[TypingSequence[Candidate]],
        reports: tuple[tuple[bytes, ...], ...] = (),
    ) -> BeamStep:
        """Return the next step; changes nothing.

        Args:
            candidates: Of each running beam.
            reports: As in BeamStep.
        """
        width, rate = self.spec.beam_width, self.spec.beam_diversity_rate
        ordered = sorted(
            (-(beam.cumulative + log_prob + rate * rank), rank, token, log_prob)
            for rank, (beam, row) in enumerate(zip(self.running, candidates, strict=True))
            for token, log_prob in row
        )
        kept: list[tuple[int, int, float, int]] = []
        num_running = 0
        for place, (_, rank, token, log_prob) in enumerate(ordered):
            if num_running == width or (place >= width and self._is_last_step):
                break
            if not self._ends_with(token):
                num_running += 1
            elif place >= width:
                continue
            token_rank = 1 + sum(other > log_prob for _, other in candidates[rank])
            kept.append((rank, token, log_prob, token_rank))
        return BeamStep(
            tuple(rank for rank, _, _, _ in kept),
            tuple(token for _, token, _, _ in kept),
            tuple(log_prob for _, _, log_prob, _ in kept),
            tuple(token_rank for _, _, _, token_rank in kept),
            reports,
        )

    def apply(self, step: BeamStep) -> list[int]:
        """Takes a step.

        Returns:
            For each beam that goes on now, the rank it or its parent had before.
        """
        before, self.running = self.running, []
        parents: list[int] = []
        entries = zip(step.parents, step.token_ids, step.log_probs, strict=True)
        for place, (rank, token, log_prob) in enumerate(entries):
            beam = before[rank].extended(token, log_prob, place)
            if self._ends_with(token):
                self.ended.append(EndedBeam(self._score(beam.cumulative, len(beam.tokens)), beam, self._stop_id(token)))
            else:
                self.running.append(beam)
                parents.append(rank)
        self.ended.sort(key=lambda item: -item.score)
        del self.ended[self.spec.beam_width :]
        self.steps.append(step)
        self.is_over = self._is_over()
        return parents

    @property
    def _is_last_step(self) -> bool:
        return len(self.steps) + 1 >= self.spec.max_tokens

    def _ends_with(self, token: int) -> bool:
        return self._is_last_step or self._stop_id(token) is not None

    def _stop_id(self, token: int) -> int | None:
        is_stop = token in self.spec.stop_token_ids and len(self.steps) + 1 >= self.spec.min_tokens
        return token if is_stop else None

    def _score(self, cumulative: float, length: int) -> float:
        # Any penalty is allowed, so the power may lie beyond what a float holds.
        exponent = -self.spec.length_penalty * math.log(length)
        return cumulative * math.exp(max(-_MAX_EXPONENT, min(_MAX_EXPONENT, exponent)))

    def _is_over(self) -> bool:
        spec = self.spec
        if not self.running:
            return True
        if len(self.ended) < spec.beam_width:
            return False
        if spec.early_stopping == STOP_WHEN_FULL:
            return True
        length = len(self.steps)
        if spec.early_stopping != STOP_BY_PRESENT_LENGTH and spec.length_penalty > 0:
            length = spec.max_tokens
        return self._score(self.running[0].cumulative, length) <= self.ended[-1].score
