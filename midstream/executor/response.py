"""Responses returned by `await_responses`: pieces of output with the id of their request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from midstream.chunk import Chunk, PerfMetrics
from midstream.errors import MidstreamError
from midstream.executor.output import CompletionOutput, stack_tensors
from midstream.extras import CONTEXT, Tensor, join_tensors


@dataclass(frozen=True, slots=True)
class ResponseResult:
    """Output since the previous response, of one sequence or, in a beam search, of all beams.

    Lists have one entry per beam; a sampled sequence is one beam.

    Attributes:
        sequence_index: Index of the sequence; 0 in beam search.
        output_token_ids: Tokens of each beam.
        texts: Text of each beam.
        is_sequence_final: Whether this is the sequence's last response.
        is_final: Whether this is the request's last response.
        finish_reasons: Finish reason of each beam that has ended.
        cum_log_probs: Cumulative log probability of each beam at its end, if requested.
        log_probs: Log probability of each token of each beam, if requested.
        tensors: Tensors of each beam, by name.
        kind_changed_at: Index of the first token that another kind of workers computed; None if there is none.
    """

    sequence_index: int
    output_token_ids: list[list[int]]
    texts: list[str]
    is_sequence_final: bool
    is_final: bool
    finish_reasons: list[str]
    cum_log_probs: list[float]
    log_probs: list[list[float]]
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    request_perf_metrics: PerfMetrics | None = None
    kind_changed_at: int | None = None

    @property
    def text(self) -> str:
        """Text of the first beam."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first beam."""
        return self.finish_reasons[0] if self.finish_reasons else None

    @property
    def context_logits(self) -> Tensor | None:
        """Logits at each prompt token [prompt tokens, vocabulary], if requested."""
        return self.tensors[0].get("context_logits") if self.tensors else None

    @property
    def generation_logits(self) -> Tensor | None:
        """Logits at each output token [beams, tokens, vocabulary], if requested."""
        return self._stacked("generation_logits")

    @property
    def additional_outputs(self) -> dict[str, Tensor]:
        """Additional outputs by name: `NAME` [beams, tokens, ...], `context_NAME` [prompt tokens, ...]."""
        found: dict[str, Tensor] = {}
        for name in self.tensors[0] if self.tensors else ():
            tensor = self.tensors[0][name] if name.startswith(CONTEXT) else self._stacked(name)
            if tensor is not None and name not in ("context_logits", "generation_logits"):
                found[name] = tensor
        return found

    def _stacked(self, name: str) -> Tensor | None:
        beams = [tensors[name] for tensors in self.tensors if name in tensors]
        return stack_tensors(beams) if beams else None


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a request: a result or an error."""

    request_id: int
    result: ResponseResult | None = None
    error: MidstreamError | None = None

    def has_error(self) -> bool:
        """Return whether the request failed. An error response is the last one of its request."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """Description of the error."""
        return str(self.error) if self.error else ""

    @property
    def is_final(self) -> bool:
        """Whether this is the request's last response."""
        return self.error is not None or (self.result is not None and self.result.is_final)


def response_of_chunk(chunk: Chunk) -> ResponseResult:
    """Return the result for one chunk of a sampled sequence."""
    log_probs = chunk.extras.log_probs if chunk.extras else None
    return ResponseResult(
        sequence_index=chunk.sequence_index,
        output_token_ids=[list(chunk.token_ids)],
        texts=[chunk.text],
        is_sequence_final=chunk.is_sequence_final,
        is_final=chunk.is_final,
        finish_reasons=[chunk.finish_reason.value] if chunk.finish_reason else [],
        cum_log_probs=[] if chunk.cumulative_log_prob is None else [chunk.cumulative_log_prob],
        log_probs=[list(log_probs.token_log_probs)] if log_probs else [],
        tensors=[join_tensors(chunk.extras.tensors)] if chunk.extras else [],
        request_perf_metrics=chunk.perf_metrics,
        kind_changed_at=chunk.kind_changed_at,
    )


def response_of_beams(beams: Sequence[CompletionOutput], perf_metrics: PerfMetrics | None) -> ResponseResult:
    """Return the result for a beam search: all beams, best first."""
    return ResponseResult(
        sequence_index=0,
        output_token_ids=[list(beam.token_ids) for beam in beams],
        texts=[beam.text for beam in beams],
        is_sequence_final=True,
        is_final=True,
        finish_reasons=[beam.finish_reason for beam in beams if beam.finish_reason],
        cum_log_probs=[beam.cumulative_logprob for beam in beams if beam.cumulative_logprob is not None],
        log_probs=[
            [entry[token].logprob for token, entry in zip(beam.token_ids, beam.logprobs, strict=False)]
            for beam in beams
            if beam.logprobs
        ],
        tensors=[beam.whole_tensors() for beam in beams],
        request_perf_metrics=perf_metrics,
        kind_changed_at=next((beam.kind_changed_at for beam in beams if beam.kind_changed_at is not None), None),
    )
