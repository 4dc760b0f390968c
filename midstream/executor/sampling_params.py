"""TensorRT-LLM's `SamplingParams`, with its defaults, and the conversion to the service's request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.client.request import naming, set_fields, words_of
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.output_config import AdditionalModelOutput
from midstream.executor.request import DYNAMIC_POST_PROCESSOR_NAME
from midstream.executor.request_parts import GuidedDecodingParams, LookaheadDecodingConfig
from midstream.executor.sampling_config import (
    DEFAULT_MIN_TOKENS,
    DEFAULT_SEED,
    check_range,
    fill_choice,
    fill_penalties,
    ngram_size,
)
from midstream.executor.tensors import AnyTensor, bias_of
from protos import generation_pb2 as pb


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters. None means the default of TensorRT-LLM, which is given in docs/executor.md: greedy
    sampling unless `top_k` or `top_p` is set, and the model's end ids.

    Attributes:
        end_id: Token that ends a sequence, instead of the model's end ids; -1 means none.
        max_tokens: Maximum number of tokens per sequence.
        bad: Text or texts that may not be generated, with and without a leading space.
        bad_token_ids: Tokens that may not be generated.
        stop: Text or texts that end a sequence; the output includes them only with include_stop_str_in_output.
        stop_token_ids: Tokens that end a sequence.
        include_stop_str_in_output: Whether the text and the tokens include the stop text or token.
        embedding_bias: Values to add to the logits: a vector [vocab_size], or by token id.
        logits_processor: Name of a logits post-processor registered in the workers, or a function of this process.
        apply_batched_logits_processor: Use the `processor_batched` of LogitsPostProcessorConfig.
        n: Number of sequences or beams to return.
        best_of: Number of sequences to generate, of which the `n` with the highest probability are returned; or the
            beam width.
        use_beam_search: Search with `best_of`, or `n`, beams.
        beam_width: The number of beams, instead of `best_of`.
        logprobs: Report the log probabilities of each token and of this number of most likely tokens.
        prompt_logprobs: The same for the prompt's tokens, from the second one on.
        additional_model_outputs: Further outputs, as objects, names, or `(name, True)` for the prompt's tokens too.
        lookahead_config: Lookahead decoding, for which the service uses prompt lookup.
        ignore_eos: Continue past the end id.
        add_special_tokens, spaces_between_special_tokens: Must be True; a tokenizer's own rules apply.
        truncate_prompt_tokens: Use only this number of last tokens of the prompt, which must be token ids.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Mapping[int, float] | AnyTensor | None = None
    logits_processor: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Sequence[AdditionalModelOutput | str | tuple[str, bool]] | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __setattr__(self, name: str, value: object) -> None:
        check_range(name, value)
        object.__setattr__(self, name, value)

    @property
    def num_beams(self) -> int:
        """Number of beams to search with; 1 means no search."""
        if self.beam_width is not None and (self.use_beam_search or self.beam_width > 1):
            return self.beam_width
        return self.best_of or self.n if self.use_beam_search else 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate; in a beam search, to return."""
        if self.num_beams > 1:
            return self.num_beams if self.n == 1 and self.beam_width is not None else self.n
        return self.best_of or self.n

    def fill(self, request: pb.GenerateRequest) -> None:
        """Set the request's fields.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
            UnsupportedError: The service lacks a feature.
        """
        self._check()
        set_fields(request, max_tokens=self.max_tokens)
        self._fill_sampling(request.sampling)
        self._fill_stopping(request.stopping)
        self._fill_output(request.output)
        if self.guided_decoding is not None:
            with naming("guided_decoding"):
                request.guided_decoding.CopyFrom(self.guided_decoding.to_proto())
        if self.lookahead_config is not None:
            request.speculative.CopyFrom(self.lookahead_config.to_proto())
        with naming("logits_processor"):
            request.logits_post_processor_name = self._processor_name()

    def _check(self) -> None:
        with naming("n"):
            if self.n < 1 or (self.best_of is not None and self.best_of < self.n):
                raise InvalidArgumentError("must be at least n", field="best_of" if self.best_of else "n")
        if self.return_encoder_output:
            raise UnsupportedError("encoder-decoder models are not supported", field="return_encoder_output")
        if self.beam_width_array and set(self.beam_width_array) != {self.num_beams}:
            raise UnsupportedError("beam widths cannot vary; set best_of", field="beam_width_array")
        for name in ("add_special_tokens", "spaces_between_special_tokens"):
            if not getattr(self, name):
                raise UnsupportedError("the tokenizer's own rules apply; pass token ids", field=name)

    def _fill_sampling(self, sampling: pb.SamplingConfig) -> None:
        fill_choice(sampling, self.num_beams, self.top_k, self.top_p, self.min_p, self.temperature)
        fill_penalties(
            sampling, self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )
        set_fields(
            sampling,
            num_return_sequences=self.num_sequences if max(self.num_sequences, self.num_beams) > 1 else None,
            top_p_min=self.top_p_min,
            top_p_reset_id=self.top_p_reset_ids,
            top_p_decay=self.top_p_decay,
            seed=DEFAULT_SEED if self.seed is None else self.seed,
            min_tokens=DEFAULT_MIN_TOKENS if self.min_tokens is None else self.min_tokens,
            beam_search_diversity_rate=self.beam_search_diversity_rate,
            length_penalty=self.length_penalty,
            early_stopping=None if self.early_stopping is None else int(self.early_stopping),
            no_repeat_ngram_size=ngram_size(self.no_repeat_ngram_size),
        )
        if self.embedding_bias is not None:
            with naming("embedding_bias"):
                sampling.embedding_bias.update(bias_of(self.embedding_bias))

    def _fill_stopping(self, stopping: pb.StoppingConfig) -> None:
        stopping.ignore_eos = self.ignore_eos or self.end_id == -1
        stopping.include_stop_in_output = self.include_stop_str_in_output
        if self.end_id != -1:
            set_fields(stopping, end_id=self.end_id)
        if self.pad_id is not None and self.pad_id >= 0:
            set_fields(stopping, pad_id=self.pad_id)
        with naming("stop"):
            stopping.stop_words.extend(words_of(self.stop or ()))
        with naming("stop_token_ids"):
            stopping.stop_token_ids.extend(self.stop_token_ids or ())
        with naming("bad"):
            stopping.bad_words.extend(words_of(self.bad or ()))
        with naming("bad_token_ids"):
            stopping.bad_word_token_ids.extend(pb.TokenIds(values=[token]) for token in self.bad_token_ids or ())

    def _fill_output(self, output: pb.OutputConfig) -> None:
        with naming("logprobs"):
            if self.logprobs is not None:
                output.log_probs = self.logprobs
            elif self.best_of is not None and self.best_of > self.n:
                output.log_probs = 0  # to rank the sequences
        with naming("prompt_logprobs"):
            if self.prompt_logprobs is not None:
                output.prompt_log_probs = self.prompt_logprobs
        set_fields(
            output,
            return_context_logits=self.return_context_logits,
            return_generation_logits=self.return_generation_logits,
            exclude_input_from_output=self.exclude_input_from_output,
            return_perf_metrics=self.return_perf_metrics,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
        )
        with naming("additional_model_outputs"):
            for item in self.additional_model_outputs or ():
                if isinstance(item, AdditionalModelOutput):
                    output.additional_outputs.add(name=item.name, gather_context=item.gather_context)
                else:
                    name, gather_context = (item, False) if isinstance(item, str) else item
                    output.additional_outputs.add(name=name, gather_context=gather_context)

    def _processor_name(self) -> str:
        processor = self.logits_processor
        if isinstance(processor, list | tuple):
            if len(processor) > 1:
                raise UnsupportedError("give one function, which may call others", field="logits_processor")
            processor = processor[0] if processor else None
        if self.apply_batched_logits_processor:
            return "batched"
        return DYNAMIC_POST_PROCESSOR_NAME if callable(processor) else processor or ""  # type: ignore[return-value]
