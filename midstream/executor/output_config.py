"""What a response contains: TensorRT-LLM's `OutputConfig` and additional outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import UnsupportedError
from midstream.executor.tensors import AnyTensor
from protos import generation_pb2 as pb


@dataclass(slots=True)
class AdditionalModelOutput:
    """A named output of the model.

    Attributes:
        name: Such as `hidden_states.0` or `topk_logits.5`, or the name of an output probe registered in the workers.
        gather_context: Whether to report the output for the prompt's tokens too.
    """

    name: str
    gather_context: bool = False


@dataclass(slots=True)
class AdditionalOutput:
    """An additional output in a result: `NAME` [beams, tokens, ...] or `context_NAME` [prompt tokens, ...]."""

    name: str
    output: AnyTensor


@dataclass(slots=True)
class OutputConfig:
    """Outputs in addition to tokens.

    Attributes:
        exclude_input_from_output: If False, the output of a request that does not stream begins with the prompt.
        return_encoder_output: Must be False; encoder-decoder models are not supported.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Sequence[AdditionalModelOutput] | None = None

    def fill(self, output: pb.OutputConfig) -> None:
        """Set the service's fields.

        Raises:
            UnsupportedError: Output of an encoder is requested.
        """
        if self.return_encoder_output:
            raise UnsupportedError("encoder-decoder models are not supported", field="return_encoder_output")
        if self.return_log_probs:
            output.log_probs = 0
        output.return_context_logits = self.return_context_logits
        output.return_generation_logits = self.return_generation_logits
        output.return_perf_metrics = self.return_perf_metrics
        for item in self.additional_model_outputs or ():
            output.additional_outputs.add(name=item.name, gather_context=item.gather_context)
