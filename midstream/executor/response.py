"""What `await_responses` gives: pieces of output, each with the id of its request."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.chunk import Chunk, PerfMetrics
from midstream.errors import MidstreamError
from midstream.extras import Tensor


@dataclass(frozen=True, slots=True)
class ResponseResult:
    """What a response brings: the tokens and text of one sequence since the response before."""

    sequence_index: int
    output_token_ids: list[list[int]]
    text: str
    is_sequence_final: bool
    is_final: bool
    finish_reasons: list[str]
    cum_log_probs: list[float]
    log_probs: list[list[float]]
    tensors: list[Tensor]
    request_perf_metrics: PerfMetrics | None


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a request: a result, or what went wrong."""

    request_id: int
    result: ResponseResult | None = None
    error: MidstreamError | None = None

    def has_error(self) -> bool:
        """Whether the request has failed; nothing follows then."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """What went wrong."""
        return str(self.error) if self.error else ""

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self.error is not None or (self.result is not None and self.result.is_final)


def response_result(chunk: Chunk) -> ResponseResult:
    """Of one chunk."""
    log_probs = chunk.extras.log_probs if chunk.extras else None
    return ResponseResult(
        sequence_index=chunk.sequence_index,
        output_token_ids=[list(chunk.token_ids)],
        text=chunk.text,
        is_sequence_final=chunk.is_sequence_final,
        is_final=chunk.is_final,
        finish_reasons=[chunk.finish_reason.value] if chunk.finish_reason else [],
        cum_log_probs=[] if chunk.cumulative_log_prob is None else [chunk.cumulative_log_prob],
        log_probs=[list(log_probs.token_log_probs)] if log_probs else [],
        tensors=list(chunk.extras.tensors) if chunk.extras else [],
        request_perf_metrics=chunk.perf_metrics,
    )
