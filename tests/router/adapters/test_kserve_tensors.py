"""Conversion of KServe tensors to fields of the native request, and of outputs to tensors."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from protos import kserve_pb2
from router.pipeline.prompt import PromptBuilder, PromptOptions
from router.protocols.kserve.ensemble import INPUTS, _fill_bias
from router.protocols.kserve.tensors import FINAL, InputTensor, OutputTensor, StreamResponses, parse_inputs

TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_prompt_table_comes_typed_or_raw() -> None:
    expected = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=[2, 3], data=TABLE.tobytes(), name="table", is_last=True)
    for is_raw in (False, True):
        infer = kserve_pb2.ModelInferRequest()
        item = infer.inputs.add(name="prompt_embedding_table", datatype="FP32", shape=[1, 2, 3])
        if is_raw:
            infer.raw_input_contents.append(TABLE.tobytes())
        else:
            item.contents.fp32_contents.extend(TABLE.ravel().tolist())
        native = pb.GenerateRequest()
        tensor = parse_inputs(infer)["prompt_embedding_table"].row(0, 1)
        INPUTS[tensor.name].fill(native, tensor)
        assert native.prompt_tuning.table == expected


def test_a_tensor_has_few_dimensions() -> None:
    """So that a request cannot make the router multiply thousands of sizes."""
    for num_dimensions, is_refused in ((8, False), (9, True)):
        infer = kserve_pb2.ModelInferRequest()
        infer.inputs.add(name="t", datatype="INT32", shape=[1] * num_dimensions).contents.int_contents.append(5)
        if is_refused:
            with pytest.raises(InvalidArgumentError, match="t: has 9 dimensions; must have at most 8"):
                parse_inputs(infer)
        else:
            assert list(parse_inputs(infer)["t"].values) == [5]


def test_each_response_of_a_stream_describes_its_own_outputs() -> None:
    responses = StreamResponses(kserve_pb2.ModelInferResponse(model_name="ensemble", id="7"))
    text = OutputTensor.of_texts("text_output", ["Ja"])
    made = [
        responses.make(tensors, is_final=is_final)
        for tensors, is_final in (
            ([text], False),
            ([text, OutputTensor.of_floats("output_log_probs", [1, 2], [-0.5, -1.0])], True),
            ([text], False),
        )
    ]
    for item in made:
        assert not item.error_message
        response = item.infer_response
        assert (response.model_name, response.id) == ("ensemble", "7")
        assert (response.outputs[0].name, response.outputs[0].datatype) == ("text_output", "BYTES")
        assert response.raw_output_contents[0] == b"\x02\x00\x00\x00Ja"
    assert [item.infer_response.parameters[FINAL].bool_param for item in made] == [False, True, False]
    assert [len(item.infer_response.outputs) for item in made] == [1, 2, 1]
    second = made[1].infer_response
    assert list(second.outputs[1].shape) == [1, 2]
    assert np.frombuffer(second.raw_output_contents[1], "<f4").tolist() == [-0.5, -1.0]


async def test_each_word_has_its_own_bias_and_special_tokens_have_none() -> None:
    class Prompts:
        async def token_ids(self, request: pb.GenerateRequest, options: PromptOptions) -> list[int]:
            assert options.adds_special_tokens is False
            return [ord(character) for character in request.prompt]

    request = pb.GenerateRequest()
    parts = {
        "embedding_bias_words": InputTensor("embedding_bias_words", "BYTES", (1, 3), (b"", b"a", b"bc")),
        "embedding_bias_weights": InputTensor("embedding_bias_weights", "FP32", (1, 3), (9.0, 1.0, -2.0)),
    }
    await _fill_bias(request, parts, cast("PromptBuilder", Prompts()))
    assert dict(request.sampling.embedding_bias) == {ord("a"): 1.0, ord("b"): -2.0, ord("c"): -2.0}
