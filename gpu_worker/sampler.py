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

import kernels
from gpu_worker.distribution import invert, top_threshold
from gpu_worker.rows import Feature, Rows
from gpu_worker.step import IntArray, RowLogProbs
from gpu_worker.uniforms import uniforms

# Below it the likeliest token is as good as certain, and logits divided by it might overflow.
_MIN_TEMPERATURE = 1e-6


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
        # One copy, because on a GPU each waits for the step to end; float64 holds both exactly.
        found = torch.stack((best.double(), highest.double())).cpu().numpy()
        token_ids, is_broken = found[0].astype(np.int32), ~np.isfinite(found[1])
        is_special = (self._rows.temperature[rows] > 0) | (self._rows.features[rows] != 0)
        is_special &= ~is_broken
        if not is_special.any():
            return Sampled(token_ids, is_broken, ())
        places = np.flatnonzero(is_special)
        special, raw = rows[places], logits
        if len(places) < len(rows):
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
        places = self._with(rows, Feature.PENALTIES)
        if not places:
            return
        state = self._rows
        known = [state.tokens[rows[i], : state.lengths[rows[i]]] for i in places]
        output = [state.tokens[rows[i], state.prompt_lengths[rows[i]] : state.lengths[rows[i]]] for i in places]
        sampling = [state.sampling[rows[i]] for i in places]
        flat, width, device = logits.view(-1), logits.shape[1], logits.device

        def keys(tokens: list[IntArray]) -> NDArray[np.int64]:
            return np.concatenate([part.astype(np.int64) + i * width for i, part in zip(places, tokens, strict=True)])

        def spread(values: list[float], keys: NDArray[np.int64]) -> Tensor:
            """Each key's row's value."""
            by_row = np.zeros(len(rows), dtype=np.float32)
            by_row[places] = values
            return torch.from_numpy(by_row[keys // width]).to(device)

        # A token that occurs more than once is read before any is written, and written with one value.
        seen = keys(known)
        places_seen = torch.from_numpy(seen).to(device)
        repetition = spread([item.repetition_penalty for item in sampling], seen)
        values = flat[places_seen]
        flat[places_seen] = torch.where(values > 0, values / repetition, values * repetition)
        emitted, counts = np.unique(keys(output), return_counts=True)
        places_emitted = torch.from_numpy(emitted).to(device)
        penalty = spread([item.presence_penalty for item in sampling], emitted)
        penalty += spread([item.frequency_penalty for item in sampling], emitted) * torch.from_numpy(counts).to(device)
        flat[places_emitted] -= penalty

    def _hold_back_end(self, logits: Tensor, rows: IntArray) -> None:
        for i in self._with(rows, Feature.MIN_TOKENS):
            sampling = self._rows.sampling[rows[i]]
            if self._rows.lengths[rows[i]] - self._rows.prompt_lengths[rows[i]] < sampling.min_tokens:
                logits[i, list(sampling.end_ids)] = -torch.inf

    def _draw(self, logits: Tensor, rows: IntArray) -> IntArray:
        if kernels.can_sample(logits):
            return self._draw_on_gpu(logits, rows)
        state, device = self._rows, logits.device
        temperature = np.maximum(state.temperature[rows], _MIN_TEMPERATURE)
        if (temperature != 1.0).any():
            logits = logits / torch.from_numpy(temperature).to(device)[:, None]
        probabilities = torch.softmax(logits, dim=1)
        cut = np.flatnonzero((state.top_k[rows] > 0) | (state.top_p[rows] < 1.0))
        if len(cut) or (state.min_p[rows] > 0).any():
            threshold = probabilities.amax(dim=1, keepdim=True)
            threshold *= torch.from_numpy(state.min_p[rows]).to(device)[:, None]
            if len(cut):
                some = rows[cut]
                places = torch.from_numpy(cut).to(device)
                limited = probabilities if len(cut) == len(rows) else probabilities[places]
                top = top_threshold(limited, state.top_k[some], state.top_p[some])
                threshold[places] = torch.maximum(threshold[places], top)
            probabilities = probabilities.mul_(probabilities >= threshold)
        numbers = uniforms(state.seeds[rows], state.sequence_indices[rows], state.lengths[rows])
        return invert(probabilities, torch.from_numpy(numbers).to(device)).cpu().numpy().astype(np.int32)

    def _draw_on_gpu(self, logits: Tensor, rows: IntArray) -> IntArray:
        state = self._rows
        vectors = (
            np.maximum(state.temperature[rows], _MIN_TEMPERATURE).astype(np.float32),
            state.top_k[rows].astype(np.int32),
            state.top_p[rows].astype(np.float32),
            state.min_p[rows].astype(np.float32),
            state.seeds[rows].view(np.int64),
            state.sequence_indices[rows].astype(np.int32),
            state.lengths[rows].astype(np.int32),
        )
        drawn = kernels.sample(logits, *(torch.from_numpy(vector).to(logits.device) for vector in vectors))
        return drawn.cpu().numpy()

    def _log_probs(self, raw: Tensor, rows: IntArray, token_ids: IntArray) -> tuple[RowLogProbs, ...]:
        """Of the model's own distribution: before bias, penalties and temperature."""
        places = self._with(rows, Feature.LOG_PROBS)
        if not places:
            return ()
        log_probs = torch.log_softmax(raw[places], dim=1)
        own = log_probs.gather(1, torch.from_numpy(token_ids[places]).long().to(raw.device)[:, None])
        ranks = (log_probs > own).sum(dim=1) + 1
        wanted = [self._rows.sampling[rows[i]].log_probs or 0 for i in places]
        top = torch.topk(log_probs, min(max(wanted), raw.shape[1]), dim=1)
        return tuple(
            RowLogProbs(int(rows[i]), value, rank, tuple(ids[:count]), tuple(values[:count]))
            for i, value, rank, ids, values, count in zip(
                places,
                own.squeeze(1).tolist(),
                ranks.tolist(),
                top.indices.tolist(),
                top.values.tolist(),
                wanted,
                strict=True,
            )
        )


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest in each row; a NaN counts as the highest."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # several times faster than torch's
    return logits.argmax(dim=1)
