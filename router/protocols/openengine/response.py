"""Converts native chunks to openengine's events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from midstream.extras import LogProbs
from protos import openengine_pb2 as oe

Spell = Callable[[int], str]

_REASONS = {
    FinishReason.STOP: oe.FINISH_REASON_STOP,
    FinishReason.LENGTH: oe.FINISH_REASON_LENGTH,
    FinishReason.ABORT: oe.FINISH_REASON_CANCELLED,
}
_CODES: tuple[tuple[type[MidstreamError], oe.ErrorCode.ValueType], ...] = (
    (UnsupportedError, oe.ERROR_CODE_UNSUPPORTED_FEATURE),
    (InvalidArgumentError, oe.ERROR_CODE_INVALID_ARGUMENT),
    (OverloadedError, oe.ERROR_CODE_OVERLOADED),
    (UnavailableError, oe.ERROR_CODE_OVERLOADED),
    (NotFoundError, oe.ERROR_CODE_REQUEST_NOT_FOUND),
    (AlreadyExistsError, oe.ERROR_CODE_DUPLICATE_REQUEST),
)
_RETRYABLE = (OverloadedError, UnavailableError)


class Events:
    """Converts the chunks of one request to events; text and tokens are never cumulative."""

    def __init__(self, request: oe.GenerateRequest, end_ids: Sequence[int], spell: Spell) -> None:
        """`spell` returns a token's text; `end_ids` are the end tokens of the model."""
        self._request_id = request.request_id
        self._start = request.response.prompt_logprob_start
        self._prompt_ids = list(request.token_ids.ids)
        self._end_ids = frozenset(end_ids)
        self._spell = spell
        self._usage: Usage | None = None

    def of(self, chunk: Chunk) -> Iterator[oe.GenerateResponse]:
        """Yield the events for one chunk of a request that has not failed."""
        extras = chunk.extras
        if extras is not None and extras.prompt_log_probs is not None:
            yield self._event(prompt=self._prompt(extras.prompt_log_probs))
        if chunk.token_ids or chunk.text:
            tokens = _tokens(chunk.token_ids, extras.log_probs if extras else None, self._spell)
            output = oe.TokenOutput(output_index=chunk.sequence_index, tokens=tokens, text=chunk.text)
            yield self._event(token=output)
        if chunk.is_final:
            self._usage = chunk.usage
        if chunk.is_sequence_final:
            response = self._event(finished=self._finished(chunk))
            if self._usage is not None:
                response.usage.CopyFrom(_usage(self._usage))
            yield response

    def failure(self, error: MidstreamError) -> oe.GenerateResponse:
        """Return the final event of a request that was accepted but failed."""
        code = next((code for kind, code in _CODES if isinstance(error, kind)), oe.ERROR_CODE_INTERNAL)
        retryable = isinstance(error, _RETRYABLE)
        return self._event(error=oe.EngineError(code=code, message=str(error), retryable=retryable))

    def _event(
        self,
        prompt: oe.PromptOutput | None = None,
        token: oe.TokenOutput | None = None,
        finished: oe.GenerationFinished | None = None,
        error: oe.EngineError | None = None,
    ) -> oe.GenerateResponse:
        return oe.GenerateResponse(
            request_id=self._request_id, prompt=prompt, token=token, finished=finished, error=error
        )

    def _prompt(self, rows: LogProbs) -> oe.PromptOutput:
        # The first token has no context, and therefore no log probability.
        ids = self._prompt_ids or [0] * (len(rows.token_log_probs) + 1)
        first = oe.TokenInfo(token_id=ids[0], token=self._spell(ids[0]))
        tokens = [first, *_tokens(ids[1:], rows, self._spell)]
        return oe.PromptOutput(tokens=tokens[self._start :])

    def _finished(self, chunk: Chunk) -> oe.GenerationFinished:
        reason = _REASONS.get(chunk.finish_reason or FinishReason.STOP, oe.FINISH_REASON_UNSPECIFIED)
        finished = oe.GenerationFinished(output_index=chunk.sequence_index, reason=reason)
        if isinstance(chunk.matched_stop, str):
            finished.stop_match.stop_text = chunk.matched_stop
        elif chunk.matched_stop is not None:
            kind = "eos_token_id" if chunk.matched_stop in self._end_ids else "stop_token_id"
            setattr(finished.stop_match, kind, chunk.matched_stop)
        return finished


def _tokens(ids: Sequence[int], rows: LogProbs | None, spell: Spell) -> list[oe.TokenInfo]:
    if rows is None:
        return [oe.TokenInfo(token_id=token) for token in ids]
    infos = []
    for row, token in enumerate(ids):
        info = oe.TokenInfo(token_id=token, token=spell(token), logprob=rows.token_log_probs[row])
        if row < len(rows.token_ranks):
            info.rank = rows.token_ranks[row]
        for rank in range(rows.top_k):
            place = row * rows.top_k + rank
            candidate = rows.top_token_ids[place]
            info.candidates.add(
                token_id=candidate, logprob=rows.top_log_probs[place], token=spell(candidate), rank=rank + 1
            )
        infos.append(info)
    return infos


def _usage(usage: Usage) -> oe.Usage:
    return oe.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=usage.cached_tokens,
    )
