"""Sampling parameters of the executor, with TensorRT-LLM's names; each maps to a field of the native request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midstream.client import request as native
from midstream.client.features import one_guide
from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams:
    """A constraint on the output; set exactly one field.

    Attributes:
        json: A JSON schema, as text or as a mapping.
        json_object: Whether to accept any JSON object or array.
        regex: A regular expression.
        grammar: A grammar in EBNF.
    """

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def to_proto(self) -> pb.GuidedDecodingConfig:
        """Return the message.

        Raises:
            InvalidArgumentError: Not exactly one field is set.
        """
        found = one_guide(self.json_object, self.json, self.regex, self.grammar)
        if found is None:
            raise InvalidArgumentError(
                "set exactly one of json, json_object, regex and grammar", field="guided_decoding"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(native.SamplingParams):
    """The native client's parameters, and TensorRT-LLM's aliases.

    Attributes:
        n: Same as num_return_sequences.
        use_beam_search: Search with `beam_width`, or `n`, beams.
        random_seed: Same as seed.
        bad: Same as bad_words; one or several words.
        include_stop_str_in_output: Same as include_stop_in_output.
        logprobs: Same as log_probs.
        prompt_logprobs: Same as prompt_log_probs.
        additional_model_outputs: Named outputs such as `hidden_states.0`; `(name, True)` for the prompt's tokens too.
        guided_decoding: Constraint on the output.
        logits_processor: Name of a logits post-processor registered in the workers.
    """

    n: int | None = None
    use_beam_search: bool = False
    random_seed: int | None = None
    bad: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    additional_model_outputs: Sequence[str | tuple[str, bool]] = ()
    guided_decoding: GuidedDecodingParams | None = None
    logits_processor: str = ""

    def fill(self, request: pb.GenerateRequest) -> None:
        """Set the request's fields.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
        """
        native.SamplingParams.fill(self, request)
        sampling, output = request.sampling, request.output
        with native.naming("n"):
            if self.n is not None:
                sampling.num_return_sequences = self.n
            if self.use_beam_search and self.beam_width is None:
                sampling.beam_width = self.n or 1
        with native.naming("random_seed"):
            if self.random_seed is not None:
                sampling.seed = self.random_seed
        with native.naming("logprobs"):
            if self.logprobs is not None:
                output.log_probs = self.logprobs
        with native.naming("prompt_logprobs"):
            if self.prompt_logprobs is not None:
                output.prompt_log_probs = self.prompt_logprobs
        with native.naming("bad"):
            if self.bad is not None:
                request.stopping.bad_words.extend(native.words_of(self.bad))
        request.stopping.include_stop_in_output |= self.include_stop_str_in_output
        with native.naming("additional_model_outputs"):
            for item in native.words_of(self.additional_model_outputs):  # type: ignore[arg-type]
                name, gather_context = (item, False) if isinstance(item, str) else item
                output.additional_outputs.add(name=name, gather_context=gather_context)
        if self.guided_decoding is not None:
            with native.naming("guided_decoding"):
                request.guided_decoding.CopyFrom(self.guided_decoding.to_proto())
        with native.naming("logits_processor"):
            request.logits_post_processor_name = self.logits_processor
