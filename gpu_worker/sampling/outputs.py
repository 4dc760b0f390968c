"""Additional outputs of rows: logits, hidden states, and log probabilities of the prompt.

Values of the prompt come from its context chunks, piece by piece; values of the output come with each token, from the
position it was sampled at. A sequence that is rebuilt reports only the values of its next tokens, and those of its
prompt only if it has no output yet, because the scheduler already has the earlier values. Steps without such rows skip
this module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.input_batch import ContextChunk, PreparedStep
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import OutputParams, PromptLogProbs, RowTensor
from gpu_worker.features import Feature
from gpu_worker.models.decoder import Decoder, Probe
from gpu_worker.sampling.output_probes import OutputProbe, run_probe
from midstream.errors import MidstreamError

# Number of positions whose logits are computed together, which limits the memory for a long prompt.
_NUM_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class Reports:
    """The additional outputs of a step; `errors` contains the errors of rows whose output probe failed."""

    prompt_log_probs: tuple[PromptLogProbs, ...] = ()
    tensors: tuple[RowTensor, ...] = ()
    errors: tuple[tuple[int, MidstreamError], ...] = ()


class Reporter:
    """Collects the additional outputs of the sequences in `rows`."""

    def __init__(self, rows: Rows, decoder: Decoder, probes: Mapping[str, OutputProbe] | None = None) -> None:
        self._rows = rows
        self._decoder = decoder
        self._probes = probes or {}

    def probe(self, step: PreparedStep) -> Probe | None:
        """Return the intermediate results that the forward pass must keep; None if no row needs any."""
        features = self._rows.features
        used = bool((features[step.sampled_rows] & Feature.REPORTS).any())
        if not used and not any(features[chunk.row] & Feature.REPORTS for chunk in step.contexts):
            return None
        rows = {*step.sampled_rows.tolist(), *(chunk.row for chunk in step.contexts)}
        wanted = [self._rows.outputs[row] for row in rows if features[row] & Feature.REPORTS]
        layers = {layer for params in wanted for layer, _ in params.hidden_states}
        layers.update(layer for params in wanted for name, _ in params.probes for layer in self._probes[name].layers)
        return Probe(frozenset(layers))

    def collect(self, step: PreparedStep, probe: Probe, logits: Tensor) -> Reports:
        """Return the additional outputs of a step that ran with `probe`, before its tokens are appended to the rows.

        Args:
            probe: The probe, with the intermediate results of the step.
            logits: Logits of the sampled rows that ran.
        """
        assert step.inputs is not None
        prompts: list[PromptLogProbs] = []
        tensors: list[RowTensor] = []
        starts = step.inputs.query_starts.tolist()
        for chunk, first in zip(step.contexts, starts, strict=False):
            if self._rows.features[chunk.row] & Feature.PROMPT_REPORTS:
                try:
                    self._report_prompt(chunk, first, probe, prompts, tensors)
                except MidstreamError as error:
                    self._rows.failed[chunk.row] = error  # reported with the row's next sample
        errors: list[tuple[int, MidstreamError]] = []
        positions = step.inputs.sampled.tolist()
        for place, row in enumerate(step.sampled_rows[step.is_run].tolist()):
            if self._rows.features[row] & Feature.REPORTS:
                try:
                    if row in self._rows.failed:
                        raise self._rows.failed[row]
                    first = starts[bisect_right(starts, positions[place]) - 1]
                    tensors += self._report_token(row, first, positions[place], probe, logits[place : place + 1])
                except MidstreamError as error:
                    errors.append((row, error))
        return Reports(tuple(prompts), tuple(tensors), tuple(errors))

    def _report_token(self, row: int, first: int, position: int, probe: Probe, logits: Tensor) -> Iterator[RowTensor]:
        """Yield the outputs of a sampled token; `first` is the place of its sequence's first token in the pass."""
        params = self._rows.outputs[row]
        index = self._rows.num_sampled(row)
        if params.generation_logits:
            yield _tensor(row, "generation_logits", logits, index)
        for layer, _ in params.hidden_states:
            yield _tensor(row, f"hidden_states.{layer}", probe.states[layer][position : position + 1], index)
        for count, _ in params.topk_logits:
            yield from _top(row, f"topk_logits.{count}", logits, count, index)
        for ids, _ in params.token_logits:
            yield _tensor(row, token_logits_name(ids), logits[:, list(ids)], index)
        for name, _ in params.probes:
            start = first if self._probes[name].of_sequence else position
            yield _tensor(row, name, self._run_probe(name, probe, slice(start, position + 1), logits), index)

    def _run_probe(self, name: str, probe: Probe, positions: slice, logits: Tensor) -> Tensor:
        states = {layer: probe.states[layer][positions].float() for layer in self._probes[name].layers}
        return run_probe(name, self._probes[name], states, logits.float().clone())

    def _report_prompt(
        self, chunk: ContextChunk, first: int, probe: Probe, prompts: list[PromptLogProbs], tensors: list[RowTensor]
    ) -> None:
        params, row = self._rows.outputs[chunk.row], chunk.row
        is_last = chunk.start + chunk.length == self._rows.prompt_lengths[row]
        for layer, gathers in params.hidden_states:
            if gathers:
                states = probe.states[layer][first : first + chunk.length]
                tensors.append(_tensor(row, f"context_hidden_states.{layer}", states, chunk.start, is_last=is_last))
        if not params.logits_of_prompt:
            return
        assert probe.last is not None
        for start in range(0, chunk.length, _NUM_POSITIONS):
            end = min(start + _NUM_POSITIONS, chunk.length)
            logits = self._decoder.logits(probe.last[first + start : first + end])
            ends = is_last and end == chunk.length
            self._report_prompt_logits(row, chunk.start + start, logits, params, prompts, tensors, is_last=ends)
            for name, gathers in params.probes:
                if gathers:
                    values = self._run_probe(name, probe, slice(first + start, first + end), logits)
                    tensors.append(_tensor(row, f"context_{name}", values, chunk.start + start, is_last=ends))

    def _report_prompt_logits(
        self,
        row: int,
        position: int,
        logits: Tensor,
        params: OutputParams,
        prompts: list[PromptLogProbs],
        tensors: list[RowTensor],
        *,
        is_last: bool,
    ) -> None:
        if params.context_logits:
            tensors.append(_tensor(row, "context_logits", logits, position, is_last=is_last))
        for count, gathers in params.topk_logits:
            if gathers:
                tensors += _top(row, f"context_topk_logits.{count}", logits, count, position, is_last=is_last)
        for ids, gathers in params.token_logits:
            if gathers:
                name = f"context_{token_logits_name(ids)}"
                tensors.append(_tensor(row, name, logits[:, list(ids)], position, is_last=is_last))
        if params.prompt_log_probs is not None:
            end = min(position + len(logits), int(self._rows.prompt_lengths[row]) - 1)
            if end > position:
                tokens = self._rows.tokens[row, position + 1 : end + 1]
                rows = logits[: end - position]
                prompts.append(_prompt_log_probs(row, rows, torch.from_numpy(tokens), params.prompt_log_probs))


def _prompt_log_probs(row: int, logits: Tensor, tokens: Tensor, top_k: int) -> PromptLogProbs:
    log_probs = torch.log_softmax(logits, dim=1)
    own = log_probs.gather(1, tokens.long().to(logits.device)[:, None])
    ranks = (log_probs > own).sum(dim=1) + 1
    top_k = min(top_k, log_probs.shape[1])
    top = torch.topk(log_probs, top_k, dim=1)
    return PromptLogProbs(
        row,
        top_k,
        tuple(own.squeeze(1).tolist()),
        tuple(ranks.tolist()),
        tuple(top.indices.flatten().tolist()),
        tuple(top.values.flatten().tolist()),
    )


def _top(
    row: int, name: str, logits: Tensor, count: int, first_row: int, *, is_last: bool = False
) -> Iterator[RowTensor]:
    top = torch.topk(logits, min(count, logits.shape[1]), dim=1)
    yield _tensor(row, name, top.values, first_row, is_last=is_last)
    yield _tensor(row, f"{name}.ids", top.indices.int(), first_row, is_last=is_last)


def token_logits_name(ids: Sequence[int]) -> str:
    """Return the name of the output that contains the logits of these tokens."""
    return ".".join(("token_logits", *map(str, ids)))


def _tensor(row: int, name: str, values: Tensor, first_row: int, *, is_last: bool = False) -> RowTensor:
    array = values.cpu().numpy() if values.dtype == torch.int32 else values.float().cpu().numpy()
    return RowTensor(row, name, np.ascontiguousarray(array), first_row, is_last)
