"""Chooses each row's next token from its logits.

A batch may mix rows of every kind. All rows take part in one argmax, which is all that plain greedy rows need; the
others are copied out, their logits changed as asked (bias, penalties, min tokens), and those with a temperature are
drawn by inverting the cumulative distribution at one uniform number per row. No result depends on the batch's rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.rows import Feature, Rows
from gpu_worker.step import IntArray, RowLogProbs
from gpu_worker.uniforms import uniforms

# Likeliest tokens that are sorted first; all are where their probability does not reach top_p.
_NUM_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen.

    Attributes:
        token_ids: int32 [num_rows].
        is_broken: bool [num_rows]; the row's logits are not finite, its token means nothing.
        log_probs: Of the rows that ask for them.
    """

    token_ids: IntArray
    is_broken: NDArray[np.bool_]
    log_probs: tuple[RowLogProbs, ...]


class Sampler:
    """Samples for the sequences in `rows`."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def sample(self, logits: Tensor, rows: IntArray) -> Sampled:
        """Chooses from float32 `logits` [len(rows), vocab_size], which it leaves as they are."""
        best = _argmax(logits)
        highest = logits.gather(1, best[:, None]).squeeze(1)
        token_ids = best.cpu().numpy().astype(np.int32)
        is_broken = ~np.isfinite(highest.cpu().numpy())
        is_special = (self._rows.temperature[rows] > 0) | (self._rows.features[rows] != 0)
        is_special &= ~is_broken
        if not is_special.any():
            return Sampled(token_ids, is_broken, ())
        places = np.flatnonzero(is_special)
        special = rows[places]
        raw = logits[torch.from_numpy(places).to(logits.device)]
        token_ids[places] = self._choose(raw, special, token_ids[places])
        return Sampled(token_ids, is_broken, self._log_probs(raw, special, token_ids[places]))

    def _choose(self, raw: Tensor, rows: IntArray, best: IntArray) -> IntArray:
        features = self._rows.features[rows]
        changes = Feature.BIAS | Feature.PENALTIES | Feature.MIN_TOKENS
        if (features & changes).any():
            logits = raw.clone()
            self._add_bias(logits, rows)
            self._penalize(logits, rows)
            self._hold_back_end(logits, rows)
            chosen = _argmax(logits).cpu().numpy().astype(np.int32)
        else:
            logits, chosen = raw, best.copy()
        drawn = np.flatnonzero(self._rows.temperature[rows] > 0)
        if len(drawn):
            some = logits if len(drawn) == len(rows) else logits[torch.from_numpy(drawn).to(logits.device)]
            chosen[drawn] = self._draw(some, rows[drawn])
        return chosen

    def _with(self, rows: IntArray, feature: Feature) -> list[int]:
        return np.flatnonzero(self._rows.features[rows] & feature).tolist()

    def _add_bias(self, logits: Tensor, rows: IntArray) -> None:
        for i in self._with(rows, Feature.BIAS):
            ids, values = zip(*self._rows.sampling[rows[i]].embedding_bias, strict=True)
            logits[i, list(ids)] += torch.tensor(values, dtype=torch.float32, device=logits.device)

    def _penalize(self, logits: Tensor, rows: IntArray) -> None:
        for i in self._with(rows, Feature.PENALTIES):
            row = rows[i]
            sampling = self._rows.sampling[row]
            known = self._rows.tokens[row, : self._rows.lengths[row]]
            seen = torch.from_numpy(np.unique(known)).long().to(logits.device)
            values = logits[i, seen]
            scaled = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
            logits[i, seen] = scaled
            output, counts = np.unique(known[self._rows.prompt_lengths[row] :], return_counts=True)
            if len(output):
                penalty = sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
                ids = torch.from_numpy(output).long().to(logits.device)
                logits[i, ids] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)

    def _hold_back_end(self, logits: Tensor, rows: IntArray) -> None:
        for i in self._with(rows, Feature.MIN_TOKENS):
            sampling = self._rows.sampling[rows[i]]
            if self._rows.lengths[rows[i]] - self._rows.prompt_lengths[rows[i]] < sampling.min_tokens:
                logits[i, list(sampling.end_ids)] = -torch.inf

    def _draw(self, logits: Tensor, rows: IntArray) -> IntArray:
        state, device = self._rows, logits.device
        temperature = torch.from_numpy(state.temperature[rows]).to(device)[:, None]
        # The highest is taken off before dividing, or a small temperature would overflow.
        probabilities = torch.softmax((logits - logits.amax(dim=1, keepdim=True)) / temperature, dim=1)
        threshold = probabilities.amax(dim=1, keepdim=True) * torch.from_numpy(state.min_p[rows]).to(device)[:, None]
        cut = np.flatnonzero((state.top_k[rows] > 0) | (state.top_p[rows] < 1.0))
        if len(cut):
            places = torch.from_numpy(cut).to(device)
            top_k = torch.from_numpy(state.top_k[rows[cut]]).to(device)
            top_p = torch.from_numpy(state.top_p[rows[cut]]).to(device)
            threshold[places] = torch.maximum(threshold[places], _top_threshold(probabilities[places], top_k, top_p))
        if len(cut) or (state.min_p[rows] > 0).any():
            probabilities = torch.where(probabilities >= threshold, probabilities, 0.0)
        cumulative = torch.cumsum(probabilities, dim=1, dtype=torch.float64)
        numbers = uniforms(state.seeds[rows], state.sequence_indices[rows], state.lengths[rows])
        targets = cumulative[:, -1:] * torch.from_numpy(numbers).to(device)[:, None]
        chosen = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
        return chosen.clamp(max=logits.shape[1] - 1).cpu().numpy().astype(np.int32)

    def _log_probs(self, raw: Tensor, rows: IntArray, token_ids: IntArray) -> tuple[RowLogProbs, ...]:
        """Of the model's own distribution: before bias, penalties and temperature."""
        found = []
        for i in self._with(rows, Feature.LOG_PROBS):
            log_probs, token = torch.log_softmax(raw[i], dim=0), int(token_ids[i])
            own = log_probs[token]
            top = torch.topk(log_probs, min(self._rows.sampling[rows[i]].log_probs or 0, raw.shape[1]))
            found.append(
                RowLogProbs(
                    int(rows[i]),
                    float(own),
                    int((log_probs > own).sum()) + 1,
                    tuple(top.indices.tolist()),
                    tuple(top.values.tolist()),
                )
            )
        return tuple(found)


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest in each row; a NaN counts as the highest."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # several times faster than torch's
    return logits.argmax(dim=1)


def _top_threshold(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least probability kept by top_k (0: all) and then top_p, [num_rows, 1]."""
    num_tokens = probabilities.shape[1]
    is_limited = (top_k > 0) & (top_k < num_tokens)
    top_k, is_limited = torch.where(is_limited, top_k, num_tokens).long()[:, None], is_limited[:, None]
    width = min(num_tokens, _NUM_CANDIDATES)
    if bool((is_limited & (top_k > width)).any()):
        width = num_tokens
    while True:
        values = torch.topk(probabilities, width, dim=1).values
        # Sequential within a row: its bits depend neither on the width nor on other rows.
        cumulative = torch.cumsum(values, dim=1, dtype=torch.float64)
        mass = torch.where(is_limited, cumulative.gather(1, top_k.clamp(max=width) - 1), 1.0)
        num_kept = (cumulative < top_p[:, None] * mass).sum(dim=1, keepdim=True) + 1
        num_kept = torch.minimum(num_kept, top_k)
        if width == num_tokens or bool((num_kept <= width).all()):
            return values.gather(1, num_kept - 1)
        width = num_tokens
