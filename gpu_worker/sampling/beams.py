"""Candidates for the next token of a beam: its most likely tokens, from which the scheduler chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import IntArray, SamplingParams
from gpu_worker.sampling.distribution import MIN_TEMPERATURE

# Reported for a token that is not allowed, since JSON cannot represent its log probability, minus infinity.
_LEAST_REPORTED = -9999.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens and their log probabilities, most likely first; ties are ordered by token id.

    Attributes:
        stop_words: The stop word that each token completes, as in StepResult; empty if none does.
        top_token_ids, top_log_probs: The top tokens that the request asks for.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_token_ids: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()
    stop_words: tuple[int, ...] = ()


def find_candidates(logits: Tensor, state: Rows, rows: IntArray) -> list[Candidates]:
    """Return the candidates of beams, without their stop words; StepResult defines their number.

    Log probabilities are those of the logits divided by the temperature; temperature 0 counts as 1.

    Args:
        logits: Float32 [len(rows), vocab_size].
    """
    sampling = [state.sampling[row] for row in rows.tolist()]
    temperatures = [max(item.temperature, MIN_TEMPERATURE) if item.temperature else 1.0 for item in sampling]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    log_probs = torch.log_softmax(logits, dim=1)
    counts = [min(_num_candidates(item), logits.shape[1]) for item in sampling]
    found = []
    for place, (item, count) in enumerate(zip(sampling, counts, strict=True)):
        tokens, values = _likeliest(log_probs[place], count)
        top = torch.topk(log_probs[place], min(item.log_probs or 0, logits.shape[1]))
        top_values = top.values.clamp(min=_LEAST_REPORTED)
        found.append(Candidates(tokens, values, tuple(top.indices.tolist()), tuple(top_values.tolist())))
    return found


def _num_candidates(sampling: SamplingParams) -> int:
    if sampling.beam_stop is not None:
        return max(2, 1 + len(sampling.end_ids)) * sampling.beam_width
    return sampling.beam_width + len(sampling.end_ids)


def _likeliest(log_probs: Tensor, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if log_probs.device.type == "cpu":
        values = log_probs.numpy()
        least = np.partition(values, len(values) - count)[len(values) - count]
        # Include all ties, so that token ids decide between them.
        tokens = np.flatnonzero((values >= least) & (values > -np.inf))
        values = values[tokens]
    else:
        top = torch.topk(log_probs, count)
        tokens, values = top.indices.cpu().numpy(), top.values.cpu().numpy()
        tokens, values = tokens[values > -np.inf], values[values > -np.inf]
    order = np.lexsort((tokens, -values))[:count]
    return tuple(tokens[order].tolist()), tuple(values[order].tolist())
