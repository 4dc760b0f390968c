"""Verifies drafts: the target's own choice at each position decides.

A row with drafts is computed as one chunk: its last token and the drafts behind it. The next token is chosen at each of
these positions as it would be if the drafts before it were known, by *shadow rows*: copies of the row, each with one
draft more. Choices depend on (seed, sequence, position) and the tokens alone, so as long as a draft equals the choice
at its position, the choice at the next one is what the row would have come to without drafts. The run ends with the
first choice that differs from its draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gpu_worker.beams import Candidates
from gpu_worker.features import Feature
from gpu_worker.rows import Rows
from gpu_worker.step import EMPTY, IntArray, RowLogProbs
from midstream.errors import MidstreamError


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may come next.

    Attributes:
        tokens: Of each row that has some; the row's token array holds them behind those that are known.
        shadows: (row, number of drafts before) of each shadow row.
    """

    tokens: Mapping[int, IntArray] = field(default_factory=dict)
    shadows: dict[int, tuple[int, int]] = field(default_factory=dict)


NO_DRAFTS = Drafts()


@dataclass(slots=True)
class Answer:
    """What the sampled rows of a step gave; fields are those of StepOutput."""

    token_ids: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    candidate_log_probs: list[float] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    log_probs: tuple[RowLogProbs, ...] = ()


def with_shadows(state: Rows, generation: IntArray, drafts: Drafts) -> IntArray:
    """The rows that sample for `generation`: each of them, followed by its shadows, which are made here."""
    sampled: list[int] = []
    shadow = int(np.flatnonzero(state.is_active)[-1]) + 1
    for row in generation.tolist():
        sampled.append(row)
        tokens = drafts.tokens.get(row, EMPTY)
        length = int(state.lengths[row])
        state.tokens[row, length : length + len(tokens)] = tokens
        for count in range(1, len(tokens) + 1):
            state.make_shadow(row, shadow, length + count)
            drafts.shadows[shadow] = row, count
            sampled.append(shadow)
            shadow += 1
    return np.array(sampled, dtype=np.int32)


def settle(
    state: Rows,
    sampled_rows: IntArray,
    drafts: Drafts,
    token_ids: IntArray,
    candidates: Mapping[int, Candidates],
    errors: Mapping[int, MidstreamError],
    log_probs: tuple[RowLogProbs, ...],
) -> Answer:
    """Appends to rows what they gave: a token each, or the run of those with drafts; to beams nothing.

    Args:
        state: The rows.
        sampled_rows: As `with_shadows` made them, after the rows of contexts.
        drafts: What they verify.
        token_ids: The choice of each.
        candidates: Of the places that are beams.
        errors: Of the places that failed.
        log_probs: Of rows and shadows.
    """
    answer, lengths = Answer(), dict[int, int]()
    rows = sampled_rows.tolist()
    for place, row in enumerate(rows):
        if row in drafts.shadows:
            continue
        tokens = drafts.tokens.get(row, EMPTY)
        if state.features[row] & Feature.BEAMS:
            found = candidates.get(place)
            run = list(found.token_ids) if found is not None else []
            answer.candidate_log_probs += found.log_probs if found is not None else ()
        else:
            count = 1
            while count <= len(tokens) and token_ids[place + count - 1] == tokens[count - 1]:
                if place + count in errors:
                    break
                count += 1
            run = token_ids[place : place + count].tolist()
            lengths[row] = count
            state.append_run(row, run)
        answer.token_ids += run
        answer.num_tokens.append(len(run))
        answer.num_drafts.append(len(tokens))
    answer.log_probs = tuple(_of_runs(log_probs, drafts, lengths))
    return answer


def _of_runs(log_probs: tuple[RowLogProbs, ...], drafts: Drafts, lengths: Mapping[int, int]) -> list[RowLogProbs]:
    kept = []
    for item in log_probs:
        row, count = drafts.shadows.get(item.row, (item.row, 0))
        if count < lengths.get(row, 0):
            kept.append(replace(item, row=row))
    return kept
