"""Verifies drafts by comparing them with the tokens that the target model itself samples.

A row with drafts is computed as one chunk: its last token, followed by the drafts. At each of these positions the next
token is sampled as if the drafts before it were known, using *shadow rows*: copies of the row, each with one more
draft. Tokens depend only on (seed, sequence, position) and the tokens before, so as long as a draft equals the sampled
token, the next one is the same as without drafts. Acceptance ends with the first sampled token that differs from its
draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import EMPTY, IntArray, RowLogProbs
from gpu_worker.features import Feature
from gpu_worker.sampling.beams import Candidates
from midstream.errors import MidstreamError


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft tokens of a step.

    Attributes:
        tokens: Drafts by row; the row's token array contains them after its known tokens.
        shadows: (row, number of drafts before its position) of each shadow row.
    """

    tokens: Mapping[int, IntArray] = field(default_factory=dict)
    shadows: dict[int, tuple[int, int]] = field(default_factory=dict)


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class Answer:
    """Results for the sampled rows of a step; fields as in StepOutput."""

    token_ids: IntArray
    log_probs: tuple[RowLogProbs, ...]
    errors: tuple[tuple[int, MidstreamError], ...]
    num_tokens: tuple[int, ...] = ()
    candidate_log_probs: tuple[float, ...] = ()
    candidate_stop_words: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()


def with_shadows(state: Rows, generation: IntArray, drafts: Drafts) -> IntArray:
    """Return the rows that sample for `generation`, each followed by its shadow rows, which are created here."""
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
    is_run: np.ndarray[tuple[int], np.dtype[np.bool_]],
    drafts: Drafts,
    choices: IntArray,
    candidates: Mapping[int, Candidates],
    errors: Sequence[tuple[int, MidstreamError]],
    log_probs: tuple[RowLogProbs, ...],
) -> Answer:
    """Append the results to the rows: one token, or the accepted tokens if the row has drafts; nothing to beams.

    Args:
        sampled_rows: Rows of context chunks that sample, then the rows that `with_shadows` returned.
        is_run: Whether each of these rows ran; False if it has failed.
        choices: The sampled tokens, one per row.
        candidates: Candidates of beams, by index among the rows that ran.
        errors: (row, error) of each row that failed.
        log_probs: Log probabilities of rows and shadows.
    """
    failed = dict(errors)
    places_run = np.flatnonzero(is_run).tolist()
    found = {places_run[place]: item for place, item in candidates.items()}
    token_ids: list[int] = []
    num_tokens, num_drafts = list[int](), list[int]()
    candidate_log_probs: list[float] = []
    stop_words: list[int] = []
    lengths: dict[int, int] = {}
    rows = sampled_rows.tolist()
    for place, row in enumerate(rows):
        if row in drafts.shadows:
            continue
        tokens = drafts.tokens.get(row, EMPTY)
        if state.features[row] & Feature.BEAMS:
            run = list(found[place].token_ids) if place in found else []
            if place in found:
                candidate_log_probs += found[place].log_probs
                stop_words += found[place].stop_words or (0,) * len(run)
            lengths[row] = 1
        else:
            count = 1
            while count <= len(tokens) and choices[place + count - 1] == tokens[count - 1]:
                if rows[place + count] in failed:
                    break
                count += 1
            run = choices[place : place + count].tolist()
            lengths[row] = count
            state.append_run(row, run)
        token_ids += run
        num_tokens.append(len(run))
        num_drafts.append(len(tokens))
    return Answer(
        np.array(token_ids, dtype=np.int32),
        tuple(_of_runs(log_probs, drafts, lengths)),
        tuple((row, error) for row, error in errors if row not in drafts.shadows),
        tuple(num_tokens),
        tuple(candidate_log_probs),
        tuple(stop_words) if any(stop_words) else (),
        tuple(num_drafts) if drafts.tokens else (),
    )


def _of_runs(log_probs: tuple[RowLogProbs, ...], drafts: Drafts, lengths: Mapping[int, int]) -> list[RowLogProbs]:
    kept = []
    for item in log_probs:
        row, count = drafts.shadows.get(item.row, (item.row, 0))
        if count < lengths.get(row, 0):
            kept.append(replace(item, row=row))
    return kept
