"""Modifies logits before sampling, as requested.

The processors are, in this order: bias, penalties, a ban of end tokens until min_tokens, bad words, repeated n-grams,
and tokens that are not allowed. All depend only on the row's tokens, so a rebuilt row continues unchanged. Rows without
such parameters are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import IntArray
from gpu_worker.features import Feature
from gpu_worker.sampling.distribution import bounded

STEERING = (
    Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS | Feature.BAD_WORDS | Feature.NGRAMS | Feature.ALLOWED_TOKENS
)

Before = list[tuple[Tensor, Tensor]]


def steer(
    logits: Tensor, state: Rows, rows: IntArray, places: IntArray | None = None, before: Before | None = None
) -> None:
    """Modify `logits` [len(rows), vocab_size] of `rows` in place.

    Args:
        rows: The rows to which the logits belong.
        places: Indices of the logits to modify; None means all.
        before: Receives the modifications, as indices into the flat logits and the previous values. A later
            modification may repeat an index of an earlier one.
    """
    features = state.features[rows]
    if places is not None:
        features = np.where(np.isin(np.arange(len(rows)), places), features, 0)
    used = Feature(int(np.bitwise_or.reduce(features)))
    for feature, change in _CHANGES:
        if feature in used:
            change(logits, state, rows, np.flatnonzero(features & feature).tolist(), before)


def allow(logits: Tensor, raw: Tensor, places: list[int], masks: list[NDArray[np.uint8]]) -> None:
    """Ban all tokens outside the masks. If other processors have banned every token in a mask, their changes are
    undone.

    Args:
        logits: [num_rows, vocab_size], changed in place at `places`.
        raw: The logits before other processors changed them.
        places: Rows that have a mask.
        masks: One bit for each token, lowest first.
    """
    is_banned = _banned(np.stack(masks), logits.shape[1], logits.device)
    at = send(np.array(places, dtype=np.int64), logits.device)
    chosen = logits[at].masked_fill_(is_banned, -torch.inf)
    is_empty = torch.isneginf(chosen.amax(dim=1, keepdim=True))
    # On a GPU this is always computed, because testing whether any row is empty would wait for the device.
    if logits.device.type != "cpu" or bool(is_empty.any()):
        chosen = torch.where(is_empty, raw[at].masked_fill_(is_banned, -torch.inf), chosen)
    logits[at] = chosen


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device asynchronously."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _banned(masks: NDArray[np.uint8], vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask of the tokens that the packed masks exclude: [num_masks, bytes] -> bool [num_masks, vocab_size]."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(masks, axis=1, bitorder="little")[:, :vocab_size] == 0)
    return unpacked(send(masks, device), vocab_size).logical_not_()


def unpacked(masks: Tensor, num_bits: int) -> Tensor:
    """Unpack the bits of uint8 [num_masks, bytes], lowest bit first: bool [num_masks, num_bits]."""
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks[:, :, None] & powers).bool().flatten(1)[:, :num_bits]


def decayed_top_p(state: Rows, rows: IntArray) -> NDArray[np.float32]:
    """Return the top_p that applies to each row's next token: [len(rows)].

    It is multiplied by the decay once for each output token since the last reset id, and is at least the minimum.
    """
    top_p = state.top_p[rows]
    for i in np.flatnonzero(state.features[rows] & Feature.TOP_P_DECAY).tolist():
        row = int(rows[i])
        sampling = state.sampling[row]
        output = state.tokens[row, state.prompt_lengths[row] : state.lengths[row]]
        resets = np.flatnonzero(output == sampling.top_p_reset_id)
        num_since = len(output) - 1 - int(resets[-1]) if len(resets) else len(output)
        if num_since:
            top_p[i] = max(sampling.top_p * sampling.top_p_decay**num_since, sampling.top_p_min)
    return top_p


def repeated_ngram_ends(tokens: IntArray, size: int) -> IntArray:
    """Return the tokens that would complete an n-gram of length `size` that already occurs in `tokens`."""
    num_starts = len(tokens) - size + 1
    if num_starts < 1:
        return tokens[:0]
    starts = np.arange(num_starts)
    last = tokens[len(tokens) - size + 1 :]
    for i in range(size - 1):
        starts = starts[tokens[starts + i] == last[i]]
    return tokens[starts + size - 1]


def bad_word_ends(tokens: IntArray, words: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the last token of each word whose other tokens are all at the end of `tokens`."""
    ends = []
    for word in words:
        num_before = len(word) - 1
        if num_before <= len(tokens) and tuple(tokens[len(tokens) - num_before :].tolist()) == word[:-1]:
            ends.append(word[-1])
    return ends


def _add_bias(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    for i in places:
        ids, values = zip(*state.sampling[rows[i]].embedding_bias, strict=True)
        at = send(np.array(ids, dtype=np.int64) + i * logits.shape[1], logits.device)
        given = logits.view(-1)[at]
        biases = send(np.array(values, dtype=np.float32), logits.device)
        _write(logits, at, bounded(given + biases, is_banned=given.isneginf()), before)


def _penalize(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    at, width, device = rows[places], logits.shape[1], logits.device
    lengths, sampling = state.lengths[at], [state.sampling[row] for row in at]
    positions = np.arange(lengths.max())
    tokens = state.tokens[at, : len(positions)]
    # Ids beyond the vocabulary are those of virtual tokens, which have no logits.
    is_known = (positions < lengths[:, None]) & (tokens < width)
    keys = tokens + np.array(places)[:, None] * width

    def spread(values: list[float], keys: NDArray[np.int64]) -> Tensor:
        """Return a tensor with one value per key: that of the key's row."""
        by_row = np.zeros(len(rows), dtype=np.float32)
        by_row[places] = values
        return send(by_row[keys // width], device)

    if any(item.repetition_penalty != 1.0 for item in sampling):
        # Gather all logits before scattering: a token may occur more than once, and every occurrence must write the
        # same value.
        seen = keys[is_known]
        places_seen = send(seen, device)
        repetition = spread([item.repetition_penalty for item in sampling], seen)
        values = logits.view(-1).index_select(0, places_seen)
        penalized = torch.where(values > 0, values / repetition, values * repetition)
        _write(logits, places_seen, bounded(penalized, is_banned=values.isneginf()), before)
    if any(item.presence_penalty or item.frequency_penalty for item in sampling):
        first = np.where([item.penalize_prompt for item in sampling], 0, state.prompt_lengths[at])
        emitted, counts = np.unique(keys[is_known & (positions >= first[:, None])], return_counts=True)
        places_emitted = send(emitted, device)
        penalty = spread([item.presence_penalty for item in sampling], emitted)
        penalty += spread([item.frequency_penalty for item in sampling], emitted) * send(counts, device)
        _write(logits, places_emitted, logits.view(-1).index_select(0, places_emitted) - penalty, before)


def _hold_back_end(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    for i in places:
        sampling = state.sampling[rows[i]]
        if state.lengths[rows[i]] - state.prompt_lengths[rows[i]] < sampling.min_tokens:
            _ban(logits, i, list(sampling.end_ids), before)


def _ban_bad_words(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    for i in places:
        tokens = state.tokens[rows[i], : state.lengths[rows[i]]]
        _ban(logits, i, bad_word_ends(tokens, state.sampling[rows[i]].bad_words), before)


def _ban_ngrams(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    for i in places:
        tokens = state.tokens[rows[i], : state.lengths[rows[i]]]
        ends = repeated_ngram_ends(tokens, state.sampling[rows[i]].no_repeat_ngram_size)
        _ban(logits, i, ends[ends < logits.shape[1]], before)


def _ban_others(logits: Tensor, state: Rows, rows: IntArray, places: list[int], before: Before | None) -> None:
    for i in places:
        is_banned = state.banned[int(rows[i])]
        if before is None:  # always on a GPU, to which a mask is sent faster than indices
            logits[i].masked_fill_(send(is_banned, logits.device), -torch.inf)
        else:
            _ban(logits, i, np.flatnonzero(is_banned), before)


def _ban(logits: Tensor, place: int, token_ids: list[int] | NDArray[np.integer[Any]], before: Before | None) -> None:
    if len(token_ids):
        at = send(np.array(token_ids, dtype=np.int64) + place * logits.shape[1], logits.device)
        _write(logits, at, torch.full_like(at, -torch.inf, dtype=logits.dtype), before)


def _write(logits: Tensor, at: Tensor, values: Tensor, before: Before | None) -> None:
    if before is not None:
        before.append((at, logits.view(-1).index_select(0, at)))
    logits.view(-1).index_copy_(0, at, values)


_CHANGES = (
    (Feature.BIAS, _add_bias),
    (Feature.PENALTIES, _penalize),
    (Feature.MIN_TOKENS, _hold_back_end),
    (Feature.BAD_WORDS, _ban_bad_words),
    (Feature.NGRAMS, _ban_ngrams),
    (Feature.ALLOWED_TOKENS, _ban_others),
)
