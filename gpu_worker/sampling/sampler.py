"""Samples each row's next token from its logits.

A batch may contain rows of every kind. On a CPU, `sample` samples the tokens of all rows in one call of the kernels, or
with PyTorch operations that yield the same tokens: the token with the highest logit or, with a temperature, the one at
which the cumulative distribution exceeds a uniform random number. Rows whose logits must be modified (by
post-processors, logits processors or grammars) are first sampled with their unmodified logits, which detects logits
that are not finite, and then again with the modified ones. No result depends on other rows of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.staging import PinnedBuffers
from gpu_worker.batch.step import IntArray, RowLogProbs, RowTensor
from gpu_worker.features import Feature
from gpu_worker.sampling.beams import Candidates, find_candidates
from gpu_worker.sampling.distribution import IS_BROKEN, MIN_TEMPERATURE, argmax, invert, threshold, weights
from gpu_worker.sampling.draws import WORDS, DrawParams, draw
from gpu_worker.sampling.guided import UNCONSTRAINED, Constraints
from gpu_worker.sampling.logits_processors import STEERING, allow, decayed_top_p, send, steer
from gpu_worker.sampling.post_processors import PostProcessor, Replicate, post_process
from gpu_worker.sampling.traces import Stages, trace
from gpu_worker.sampling.uniforms import uniforms
from kernels.cpu import Draws, ThreadPool, empty_draws
from kernels.cpu import draw as draw_natively
from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError

# Sentinel that `choose` returns for a row whose constraints allow no token (see also IS_BROKEN).
_IS_EMPTY = -2
# Features that `choose` supports. The others read the logits on the host, or need their result before the next step.
_ON_DEVICE = STEERING | Feature.LOG_PROBS | Feature.TOP_P_DECAY | Feature.GUIDED
# Features that change logits before sampling: those in STEERING can be undone, the others need a copy of the row.
# TRACED changes nothing, but the logits are needed before and after every change.
_CHANGES_ROWS = Feature.GUIDED | Feature.POST_PROCESSED | Feature.BEAMS | Feature.TRACED
_CHANGES_LOGITS = STEERING | _CHANGES_ROWS
NOT_FINITE = ExecutionError("the model returned logits that are not finite")
_NOTHING_LEFT = InvalidArgumentError("the request's constraints allow no token", field="sampling")


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of sampling.

    Attributes:
        token_ids: int32 [num_rows].
        errors: (place, error) of rows without a valid token; their token is 0.
        log_probs: Log probabilities of the rows that request them.
        candidates: Candidates of beam rows, by place; these rows' tokens are invalid.
        digests: Digests of the rows' logits, if asked for.
        traces: How the tokens of the rows that ask for it were chosen.
    """

    token_ids: IntArray
    errors: tuple[tuple[int, MidstreamError], ...]
    log_probs: tuple[RowLogProbs, ...]
    candidates: dict[int, Candidates] = field(default_factory=dict)
    traces: tuple[RowTensor, ...] = ()
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Results of sampling on a device.

    Attributes:
        token_ids: int32 [num_rows]; negative if the row has no token.
        values: int32 values that `read` needs, to be copied to the host.
        failed: Errors that were known before sampling, by place.
        places: Rows that request log probabilities.
        counts: Number of top tokens that each of these requests.
    """

    token_ids: Tensor
    rows: IntArray
    values: Tensor
    failed: dict[int, MidstreamError] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def read(self, values: IntArray) -> Sampled:
        """Return the results, given `values` on the host."""
        token_ids = values[: len(self.rows)]
        is_broken = token_ids == IS_BROKEN
        errors: dict[int, MidstreamError] = dict.fromkeys(np.flatnonzero(is_broken).tolist(), NOT_FINITE)
        errors |= self.failed
        for place in np.flatnonzero(token_ids == _IS_EMPTY).tolist():
            errors.setdefault(place, _NOTHING_LEFT)
        token_ids = np.maximum(token_ids, 0)
        token_ids[list(self.failed)] = 0
        return Sampled(token_ids, tuple(errors.items()), self._log_probs(values[len(self.rows) :], is_broken))

    def _log_probs(self, values: IntArray, is_broken: NDArray[np.bool_]) -> tuple[RowLogProbs, ...]:
        if not self.places:
            return ()
        found = values.reshape(len(self.places), -1)
        num_top = (found.shape[1] - 2) // 2
        numbers = found.view(np.float32)
        return tuple(
            RowLogProbs(
                int(self.rows[place]),
                float(numbers[i, 0]),
                int(found[i, 1]),
                tuple(found[i, 2 : 2 + count].tolist()),
                tuple(numbers[i, 2 + num_top : 2 + num_top + count].tolist()),
            )
            for i, (place, count) in enumerate(zip(self.places, self.counts, strict=True))
            if not is_broken[place] and place not in self.failed
        )


def _log_probs_on_device(raw: Tensor, chosen: Tensor, places: list[int], count: int) -> Tensor:
    """Return log probabilities of the model's own distribution for some rows, as int32 bits [len(places), 2 + 2 K].

    A row contains the log probability of its chosen token, the token's rank, the row's K most likely tokens, and their
    log probabilities.
    """
    at = send(np.array(places, dtype=np.int64), raw.device)
    log_probs = torch.log_softmax(raw[at], dim=1)
    own = log_probs.gather(1, chosen[at].clamp(min=0).long()[:, None])
    ranks = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top = torch.topk(log_probs, min(count, raw.shape[1]), dim=1)
    return torch.cat((own.view(torch.int32), ranks.int(), top.indices.int(), top.values.view(torch.int32)), dim=1)


class Sampler:
    """Samples for the sequences in `rows`."""

    def __init__(
        self,
        rows: Rows,
        post_processors: Mapping[str, PostProcessor] | None = None,
        replicate: Replicate | None = None,
        threads: ThreadPool | None = None,
    ) -> None:
        """Sample for `rows`, with these threads of the CPU kernels if the logits are on the CPU; None means PyTorch."""
        self._rows = rows
        self._threads = threads
        self._post_processors = post_processors or {}
        self._replicate = replicate
        self._pinned: PinnedBuffers | None = None

    def sample(self, logits: Tensor, rows: IntArray, constraints: Constraints = UNCONSTRAINED) -> Sampled:
        """Sample from float32 `logits` [len(rows), vocab_size], which are unchanged afterwards."""
        # Logits are changed in place, and read by kernels. A copy is made only of a slice of a larger tensor.
        logits = logits.contiguous()
        is_changed = (self._rows.features[rows] & _CHANGES_LOGITS) != 0
        temperature = np.where(is_changed, 0, self._rows.temperature[rows])
        token_ids, highest = self._pick(logits, rows, _all(rows), temperature)
        errors: dict[int, MidstreamError] = dict.fromkeys(np.flatnonzero(~np.isfinite(highest)).tolist(), NOT_FINITE)
        errors |= {int(np.flatnonzero(rows == row)[0]): error for row, error in constraints.errors.items()}
        is_changed[list(errors)] = False
        candidates: dict[int, Candidates] = {}
        traces: list[RowTensor] = []
        if is_changed.any():
            is_copied = (self._rows.features[rows] & _CHANGES_ROWS) != 0
            steered, copied = (np.flatnonzero(is_changed & some).astype(np.int32) for some in (~is_copied, is_copied))
            if len(steered):
                token_ids[steered] = self._pick_steered(logits, rows, steered, errors)
            if len(copied):
                token_ids[copied] = self._pick_changed(logits, rows, copied, constraints, errors, candidates, traces)
        token_ids[list(errors)] = 0
        log_probs = self._log_probs(logits, rows, token_ids, errors)
        log_probs += tuple(
            RowLogProbs(int(rows[place]), 0.0, 0, found.top_token_ids, found.top_log_probs)
            for place, found in candidates.items()
            if found.top_token_ids
        )
        return Sampled(token_ids, tuple(errors.items()), log_probs, candidates, tuple(traces))

    def is_greedy(self, rows: IntArray) -> bool:
        """Return whether none of these rows has a temperature."""
        return not self._rows.temperature[rows].any()

    def draws(self, rows: IntArray) -> Draws | None:
        """Return how the CPU kernels draw the rows' tokens; None if all rows are greedy."""
        return None if self.is_greedy(rows) else self._draws(rows, self._rows.temperature[rows])

    def sample_chosen(self, token_ids: IntArray, highest: NDArray[np.float32]) -> Sampled:
        """Return these tokens as the result for plain rows; `highest` are the rows' highest logits."""
        is_finite = np.isfinite(highest)
        if is_finite.all():
            return Sampled(token_ids, (), ())
        is_broken = ~is_finite
        errors = dict.fromkeys(np.flatnonzero(is_broken).tolist(), NOT_FINITE)
        return Sampled(np.where(is_broken, 0, token_ids).astype(np.int32), tuple(errors.items()), ())

    def is_plain(self, rows: IntArray) -> bool:
        """Return whether sampling these rows needs only their logits, and not their tokens."""
        return not self._rows.features[rows].any()

    def can_choose(self, rows: IntArray) -> bool:
        """Return whether `choose` supports these rows."""
        return not (self._rows.features[rows] & ~_ON_DEVICE).any()

    def choose(self, logits: Tensor, rows: IntArray, constraints: Constraints = UNCONSTRAINED) -> Chosen:
        """Sample from float32 `logits` [len(rows), vocab_size] as `sample` does, asynchronously on the device."""
        raw, best = logits, argmax(logits)
        highest = logits.gather(1, best[:, None]).squeeze(1)
        features = int(np.bitwise_or.reduce(self._rows.features[rows]))
        is_empty: Tensor | None = None
        if features & (STEERING | Feature.GUIDED):
            logits = raw.clone()
            steer(logits, self._rows, rows)
            masked = [place for place in self._with(rows, Feature.GUIDED) if int(rows[place]) in constraints.masks]
            if masked:
                allow(logits, raw, masked, [constraints.masks[int(rows[place])] for place in masked])
            best = argmax(logits)
            is_empty = logits.gather(1, best[:, None]).squeeze(1) == -torch.inf
            # Allow one token in rows that have none, since a distribution must have at least one token.
            logits[:, 0].masked_fill_(is_empty, 0.0)
        chosen, drawn = best.int(), np.flatnonzero(self._rows.temperature[rows] > 0)
        if len(drawn) and kernels.can_sample(logits):
            chosen = self._draw_on_gpu(logits, rows)
        elif len(drawn):
            places = torch.from_numpy(drawn)
            chosen[places] = torch.from_numpy(self._draw(logits[places], rows[drawn]))
        if is_empty is not None:
            chosen = chosen.masked_fill(is_empty, _IS_EMPTY)
        chosen = chosen.masked_fill(~torch.isfinite(highest), IS_BROKEN)
        failed = {int(np.flatnonzero(rows == row)[0]): error for row, error in constraints.errors.items()}
        places_of = self._with(rows, Feature.LOG_PROBS)
        if not places_of:
            return Chosen(chosen, rows, chosen, failed)
        wanted = tuple(self._rows.sampling[rows[place]].log_probs or 0 for place in places_of)
        found = _log_probs_on_device(raw, chosen, places_of, max(wanted))
        return Chosen(chosen, rows, torch.cat((chosen, found.flatten())), failed, tuple(places_of), wanted)

    def _pick_steered(
        self, logits: Tensor, rows: IntArray, places: IntArray, errors: dict[int, MidstreamError]
    ) -> IntArray:
        """Return the tokens at `places`, for rows whose logits are modified in place and restored afterwards."""
        before: list[tuple[Tensor, Tensor]] = []
        steer(logits, self._rows, rows, places, before)
        token_ids, highest = self._pick(logits, rows, places, self._rows.temperature[rows[places]])
        for changed, values in reversed(before):
            logits.view(-1).index_copy_(0, changed, values)
        errors |= dict.fromkeys(places[highest == -np.inf].tolist(), _NOTHING_LEFT)
        return token_ids

    def _pick_changed(
        self,
        logits: Tensor,
        rows: IntArray,
        places: IntArray,
        constraints: Constraints,
        errors: dict[int, MidstreamError],
        candidates: dict[int, Candidates],
        traces: list[RowTensor],
    ) -> IntArray:
        """Return the tokens at `places`, chosen from a modified copy of these rows; add errors, candidates, traces."""
        rows = rows[places]
        raw = logits[torch.from_numpy(places).to(logits.device)]
        logits, failed = raw.clone(), dict[int, MidstreamError]()
        processed = self._with(rows, Feature.POST_PROCESSED)
        if processed:
            failed = post_process(logits, self._rows, rows, processed, self._post_processors, self._replicate)
        steer(logits, self._rows, rows)
        traced = self._with(rows, Feature.TRACED)
        steered = {place: logits[place].clone() for place in traced}
        guided = self._with(rows, Feature.GUIDED)
        if guided:
            allow(logits, raw, guided, [constraints.masks[int(rows[place])] for place in guided])
        token_ids, highest = self._pick(logits, rows, _all(rows), self._rows.temperature[rows])
        failed = dict.fromkeys(np.flatnonzero(highest == -np.inf).tolist(), _NOTHING_LEFT) | failed
        errors |= {int(places[place]): error for place, error in failed.items()}
        beams = [place for place in self._with(rows, Feature.BEAMS) if place not in failed]
        if beams:
            found = find_candidates(logits[beams], self._rows, rows[beams])
            candidates |= {int(places[beam]): item for beam, item in zip(beams, found, strict=True)}
        for place in traced:
            if place not in failed:
                row = int(rows[place])
                stages = Stages(raw[place], steered[place], logits[place], constraints.masks.get(row))
                top_p = float(self._top_p(rows[place : place + 1])[0])
                traces += trace(self._rows, row, stages, int(token_ids[place]), top_p)
        return token_ids

    def _pick(
        self, logits: Tensor, rows: IntArray, places: IntArray, temperature: NDArray[np.float32]
    ) -> tuple[IntArray, NDArray[np.floating[Any]]]:
        """Return the tokens for the rows at `places`, greedy if the temperature is 0, and the highest logits."""
        if self._threads is not None:
            chosen, most = draw_natively(self._threads, logits, places, self._draws(rows[places], temperature))
            return chosen.numpy(), most.numpy()
        if len(places) < len(logits):
            logits = logits[torch.from_numpy(places).to(logits.device)]
        token_ids, highest = _likeliest(logits)
        drawn = np.flatnonzero((temperature > 0) & np.isfinite(highest))
        if len(drawn):
            some = logits if len(drawn) == len(places) else logits[torch.from_numpy(drawn).to(logits.device)]
            token_ids[drawn] = self._draw(some, rows[places[drawn]])
        return token_ids, highest

    def _draws(self, rows: IntArray, temperature: NDArray[np.float32]) -> Draws:
        state, draws = self._rows, empty_draws(len(rows))
        draws["seed"] = state.seeds[rows]
        draws["temperature"] = np.where(temperature > 0, np.maximum(temperature, MIN_TEMPERATURE), 0)
        draws["top_p"] = self._top_p(rows)
        draws["min_p"], draws["top_k"] = state.min_p[rows], state.top_k[rows]
        draws["sequence_index"], draws["position"] = state.sequence_indices[rows], state.lengths[rows]
        return draws

    def _with(self, rows: IntArray, feature: Feature) -> list[int]:
        return np.flatnonzero(self._rows.features[rows] & feature).tolist()

    def _draw(self, logits: Tensor, rows: IntArray) -> IntArray:
        if kernels.can_sample(logits):
            return self._draw_on_gpu(logits, rows).cpu().numpy()
        state, device = self._rows, logits.device
        temperature = np.maximum(state.temperature[rows], np.float32(MIN_TEMPERATURE))
        found = weights(logits, torch.from_numpy(temperature).to(device))
        least = torch.from_numpy(state.min_p[rows]).to(device)[:, None]
        top_k, top_p = state.top_k[rows], self._top_p(rows)
        if (top_k > 0).any() or (top_p < 1.0).any():
            least = torch.maximum(least, threshold(found, top_k, top_p))
        numbers = uniforms(state.seeds[rows], state.sequence_indices[rows], state.lengths[rows])
        return invert(found * (found >= least), torch.from_numpy(numbers).to(device)).cpu().numpy().astype(np.int32)

    def _top_p(self, rows: IntArray) -> NDArray[np.float32]:
        if (self._rows.features[rows] & Feature.TOP_P_DECAY).any():
            return decayed_top_p(self._rows, rows)
        return self._rows.top_p[rows]

    def draw_params(self, rows: IntArray) -> DrawParams:
        """Return the parameters with which a GPU draws the rows' tokens."""
        state, wanted = self._rows, self._rows.temperature[rows]
        return DrawParams(
            seeds=state.seeds[rows].view(np.int64),
            temperature=np.where(wanted > 0, np.maximum(wanted, MIN_TEMPERATURE), 0).astype(np.float32),
            top_k=state.top_k[rows].astype(np.int32),
            top_p=self._top_p(rows).astype(np.float32),
            min_p=state.min_p[rows].astype(np.float32),
            sequence_indices=state.sequence_indices[rows].astype(np.int32),
            positions=state.lengths[rows].astype(np.int32),
        )

    def _draw_on_gpu(self, logits: Tensor, rows: IntArray) -> Tensor:
        """Return the argmax of greedy rows and sampled tokens of the other rows: int32, on the device."""
        params = self.draw_params(rows)
        if self._pinned is None or self._pinned.size < WORDS * len(rows):
            self._pinned = PinnedBuffers(logits.device, WORDS * max(len(rows), self._rows.num_rows))
        sent = self._pinned.send_arrays(params.arrays())
        return draw(logits, sent, has_top_k=params.has_top_k, has_top_p=params.has_top_p)

    def _log_probs(
        self, logits: Tensor, rows: IntArray, token_ids: IntArray, errors: Container[int]
    ) -> tuple[RowLogProbs, ...]:
        """Return log probabilities under the model's own distribution, before bias, penalties and temperature."""
        places = [place for place in self._with(rows, Feature.LOG_PROBS) if place not in errors]
        if not places:
            return ()
        log_probs = torch.log_softmax(logits[places], dim=1)
        own = log_probs.gather(1, torch.from_numpy(token_ids[places]).long().to(logits.device)[:, None])
        ranks = (log_probs > own).sum(dim=1) + 1
        wanted = [self._rows.sampling[rows[i]].log_probs or 0 for i in places]
        top = torch.topk(log_probs, min(max(wanted), logits.shape[1]), dim=1)
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


def digests_of(logits: Tensor) -> tuple[int, ...]:
    """Return the digest of each row of `logits`, as specified in protos/worker.proto (StepResult)."""
    rows = np.ascontiguousarray(logits.float().cpu().numpy())
    return tuple(int.from_bytes(hashlib.blake2b(row.data, digest_size=8).digest(), "little") for row in rows)


def _all(rows: IntArray) -> IntArray:
    return np.arange(len(rows), dtype=np.int32)


def _likeliest(logits: Tensor) -> tuple[IntArray, NDArray[np.floating[Any]]]:
    """Return each row's argmax token (see `argmax`) and its logit."""
    best = argmax(logits)
    if logits.device.type == "cpu":
        places = best.numpy()
        return places.astype(np.int32), logits.numpy()[np.arange(len(places)), places]
    # Use one copy, because each copy waits for the step to end; float64 represents both exactly.
    found = torch.stack((best.double(), logits.gather(1, best[:, None]).squeeze(1).double())).cpu().numpy()
    return found[0].astype(np.int32), found[1]
