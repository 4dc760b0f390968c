"""Converts the chunks of a request to TensorRT-LLM's results: one for each token or, without streaming, one for each
sequence; in a beam search each result is of all beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from midstream.chunk import Chunk, PerfMetrics, Usage, Validation
from midstream.chunk import FinishReason as ServiceReason
from midstream.errors import InvalidArgumentError
from midstream.executor.enums import FinishReason, RequestType
from midstream.executor.output_config import AdditionalOutput
from midstream.executor.request import Request
from midstream.executor.request_parts import ContextPhaseParams
from midstream.executor.response import RequestPerfMetrics, Result
from midstream.executor.tensors import first_rows, to_user
from midstream.extras import CONTEXT, Tensor, join_tensors

_REASONS = {
    ServiceReason.LENGTH: FinishReason.LENGTH,
    ServiceReason.ABORT: FinishReason.CANCELLED,
    ServiceReason.DEADLINE: FinishReason.TIMED_OUT,
}
_TOKENS_PER_BLOCK = 16  # if the service has not said otherwise


@dataclass(slots=True)
class _Sequence:
    """Output of one sequence so far; `num_sent` tokens were in earlier results."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    num_sent: int = 0
    reason: FinishReason = FinishReason.NOT_FINISHED
    cum_log_prob: float | None = None
    kind_changed_at: int | None = None
    validation: Validation | None = None
    first_token: int = 0


class ResponseStream:
    """The results of one request."""

    def __init__(self, request: Request, tokens_per_block: int = _TOKENS_PER_BLOCK, request_id: int = 0) -> None:
        self._request, self._request_id = request, request_id
        self._tokens_per_block = tokens_per_block
        self._prompt = [int(token) for token in request.input_token_ids]
        width = request.sampling_config.num_return_beams if request.is_beam_search else request.num_sequences
        self._sequences = [_Sequence() for _ in range(width)]
        self._context: list[Tensor] = []  # tensors of the prompt
        self._context_logits: Tensor | None = None
        self._waiting: list[Result] = []  # results without the prompt's logits, which have not arrived
        self._perf_metrics: RequestPerfMetrics | None = None

    def add(self, chunk: Chunk) -> list[Result]:
        """Return the results that a chunk completes.

        Raises:
            InvalidArgumentError: The output does not begin with the token of the request's first phase.
        """
        while chunk.sequence_index >= len(self._sequences):
            self._sequences.append(_Sequence())
        sequence = self._sequences[chunk.sequence_index]
        self._take(sequence, chunk)
        if chunk.perf_metrics is not None:
            self._note_metrics(chunk.perf_metrics, chunk.usage)
        self._waiting += self._results(chunk, sequence)
        if self._request.output_config.return_context_logits:
            self._join_context_logits(is_final=chunk.is_final)
            if self._context_logits is None and not chunk.is_final:
                return []
        done, self._waiting = self._waiting, []
        if self._context_logits is not None:
            for result in done:
                result.context_logits = to_user(self._context_logits)
        return done

    def _take(self, sequence: _Sequence, chunk: Chunk) -> None:
        self._check_phase(sequence, chunk)
        if chunk.token_ids and not sequence.tokens:
            sequence.first_token = chunk.token_ids[0]
        sequence.tokens += chunk.token_ids
        if chunk.extras is not None:
            if chunk.extras.log_probs is not None:
                sequence.log_probs += chunk.extras.log_probs.token_log_probs
            for tensor in chunk.extras.tensors:
                (self._context if tensor.name.startswith(CONTEXT) else sequence.tensors).append(tensor)
        if chunk.kind_changed_at is not None:
            sequence.kind_changed_at = chunk.kind_changed_at
        if chunk.is_sequence_final or chunk.is_final:
            sequence.cum_log_prob = chunk.cumulative_log_prob
            sequence.reason, sequence.validation = self._reason(chunk), chunk.validation
            if sequence.reason is FinishReason.END_ID and sequence.tokens:
                del sequence.tokens[-1], sequence.log_probs[len(sequence.tokens) :]
                sequence.tensors = _cut(sequence.tensors, len(sequence.tokens))

    def _check_phase(self, sequence: _Sequence, chunk: Chunk) -> None:
        """Check that the second phase of a request computes the same first token as the first phase."""
        phase = self._request.context_phase_params
        if phase is not None and chunk.token_ids and not sequence.tokens:
            expected, found = list(phase.first_gen_tokens), chunk.token_ids[0]
            if expected[chunk.sequence_index : chunk.sequence_index + 1] != [found]:
                raise InvalidArgumentError(
                    f"has {expected}, but the output begins with {found}; use the same request, model and settings",
                    field="context_phase_params.first_gen_tokens",
                )

    def _reason(self, chunk: Chunk) -> FinishReason:
        if chunk.finish_reason is ServiceReason.STOP:
            is_end = chunk.matched_stop is not None and chunk.matched_stop == self._request.end_id
            return FinishReason.END_ID if is_end else FinishReason.STOP_WORDS
        return _REASONS.get(chunk.finish_reason, FinishReason.NOT_FINISHED) if chunk.finish_reason else _NONE

    def _results(self, chunk: Chunk, sequence: _Sequence) -> Iterator[Result]:
        request = self._request
        if request.is_beam_search:
            is_new = request.streaming and chunk.sequence_index == 0 and len(sequence.tokens) > sequence.num_sent
            if chunk.is_final or is_new:
                yield self._result(self._sequences, 0, is_end=chunk.is_final, is_final=chunk.is_final)
        elif not request.streaming:
            if chunk.is_sequence_final:
                yield self._result([sequence], chunk.sequence_index, is_end=True, is_final=chunk.is_final)
        else:
            ends = chunk.is_sequence_final or chunk.is_final
            known = len(sequence.tokens)
            if not ends and known and sequence.tokens[-1] == self._request.end_id:
                known -= 1  # it is dropped when the sequence ends
            lengths = list(range(sequence.num_sent + 1, known + 1))
            if ends and (not lengths or sequence.reason is FinishReason.END_ID):
                lengths.append(known)  # the end has a result of its own, without a token
            for number, length in enumerate(lengths, 1):
                is_last = ends and number == len(lengths)
                part = replace(sequence, tokens=sequence.tokens[:length])
                yield self._result([part], chunk.sequence_index, is_end=is_last, is_final=chunk.is_final and is_last)
                sequence.num_sent = length

    def _result(self, beams: Sequence[_Sequence], index: int, *, is_end: bool, is_final: bool) -> Result:
        request, output = self._request, self._request.output_config
        repeats = request.streaming and request.return_all_generated_tokens
        starts = [beam.num_sent if request.streaming and not repeats else 0 for beam in beams]
        includes_prompt = not request.streaming and not output.exclude_input_from_output
        prompt = self._prompt if includes_prompt else []
        result = Result(
            is_final=is_final,
            output_token_ids=[[*prompt, *beam.tokens[start:]] for beam, start in zip(beams, starts, strict=True)],
            finish_reasons=[beam.reason if is_end else _NONE for beam in beams],
            sequence_index=index,
            is_sequence_final=is_end,
            decoding_iter=max(len(beam.tokens) for beam in beams),
            request_perf_metrics=self._perf_metrics if output.return_perf_metrics else None,
            validations=[beam.validation for beam in beams] if is_end else (),
            kind_changed_at=next((beam.kind_changed_at for beam in beams if beam.kind_changed_at is not None), None),
        )
        if output.return_perf_metrics and result.request_perf_metrics is None:
            result.request_perf_metrics = RequestPerfMetrics(first_iter=0, iter=max(result.decoding_iter - 1, 0))
        if is_final and request.request_type is RequestType.REQUEST_TYPE_CONTEXT_ONLY:
            result.context_phase_params = ContextPhaseParams([beam.first_token for beam in beams], self._request_id)
        if output.return_log_probs:
            result.log_probs = [beam.log_probs[: len(beam.tokens)] for beam in beams]
            result.cum_log_probs = [
                beam.cum_log_prob if is_end and beam.cum_log_prob is not None else sum(known)
                for beam, known in zip(beams, result.log_probs, strict=True)
            ]
        self._add_tensors(result, beams, starts)
        for beam in beams:
            beam.num_sent = len(beam.tokens)
        return result

    def _add_tensors(self, result: Result, beams: Sequence[_Sequence], starts: Sequence[int]) -> None:
        found: dict[str, list[Tensor]] = {}
        for beam, start in zip(beams, starts, strict=True):
            for name, tensor in join_tensors(beam.tensors).items():
                found.setdefault(name, []).append(first_rows(tensor, len(beam.tokens), start))
        outputs = []
        for name, tensors in found.items():
            stacked = stack_tensors(tensors)
            if name == "generation_logits":
                logits = to_user(stacked)
                result.generation_logits = _swapped(logits) if self._request.streaming else logits
            else:
                outputs.append(AdditionalOutput(name, to_user(stacked)))
        additional = [tensor for tensor in self._context if tensor.name != "context_logits"]
        outputs += [AdditionalOutput(name, to_user(tensor)) for name, tensor in join_tensors(additional).items()]
        result.additional_outputs = outputs
        if self._request.streaming:
            self._context = [tensor for tensor in self._context if tensor.name == "context_logits"]

    def _join_context_logits(self, *, is_final: bool) -> None:
        if self._context_logits is None:
            found = join_tensors(tensor for tensor in self._context if tensor.name == "context_logits")
            logits = found.get("context_logits")
            if logits is not None and (logits.is_last or is_final):
                self._context_logits = logits

    def _note_metrics(self, metrics: PerfMetrics, usage: Usage | None) -> None:
        self._perf_metrics = RequestPerfMetrics.from_service(metrics, usage, self._tokens_per_block)


_NONE = FinishReason.NOT_FINISHED


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack the tensors of all beams to [beams, longest, ...], padding shorter ones with zeros."""
    first = tensors[0]
    longest = max(tensor.shape[0] for tensor in tensors)
    row_bytes = max((len(tensor.data) // tensor.shape[0] for tensor in tensors if tensor.shape[0]), default=0)
    data = b"".join(tensor.data.ljust(longest * row_bytes, b"\0") for tensor in tensors)
    return Tensor(first.name, first.dtype, (len(tensors), longest, *first.shape[1:]), data)


def _cut(tensors: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """Return only the first rows of tensors in pieces."""
    return [first_rows(tensor, num_rows) for tensor in join_tensors(tensors).values()]


def _swapped(logits: object) -> object:
    """Return logits [tokens, beams, vocabulary] for [beams, tokens, vocabulary]."""
    return logits.swapaxes(0, 1)  # type: ignore[attr-defined]
