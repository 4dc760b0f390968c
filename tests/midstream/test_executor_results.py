"""Results as bytes in TensorRT-LLM's layout, and results of requests whose phases run on two executors."""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import pytest
import torch

from midstream.chunk import Chunk, Validation
from midstream.chunk import FinishReason as ServiceReason
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor import (
    AdditionalOutput,
    ContextPhaseParams,
    FinishReason,
    KvCacheMetrics,
    Request,
    RequestPerfMetrics,
    RequestType,
    Result,
    SamplingConfig,
    SpeculativeDecodingFastLogitsInfo,
    TimingMetrics,
    deserialize_result,
    serialize_result,
)
from midstream.executor.response_stream import ResponseStream

LOGITS = torch.tensor([[1.0, -2.0]])


def full_result() -> Result:
    return Result(
        is_final=True,
        output_token_ids=[[1, 2], [3]],
        cum_log_probs=[-0.5, -1.25],
        log_probs=[[-0.25, -0.25], [-1.25]],
        context_logits=LOGITS,
        generation_logits=torch.ones(2, 1, 3, dtype=torch.bfloat16),
        spec_dec_fast_logits_info=SpeculativeDecodingFastLogitsInfo(7, 1),
        finish_reasons=[FinishReason.END_ID, FinishReason.LENGTH],
        context_phase_params=ContextPhaseParams([9], 12, draft_tokens=[4, 5]),
        decoding_iter=2,
        avg_decoded_tokens_per_iter=1.5,
        sequence_index=1,
        is_sequence_final=True,
        request_perf_metrics=RequestPerfMetrics(
            TimingMetrics(arrival_time=timedelta(microseconds=5)), KvCacheMetrics(3, 2, 1, 2, 0.5), last_iter=4
        ),
        additional_outputs=[AdditionalOutput("topk", torch.tensor([[3]], dtype=torch.int32))],
    )


def test_a_result_is_the_same_after_it_was_bytes() -> None:
    result = full_result()
    found = deserialize_result(serialize_result(result))
    for name in Result.__slots__:
        before, after = getattr(result, name), getattr(found, name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after)
            assert before.dtype == after.dtype
        elif name == "additional_outputs":
            assert [(item.name, item.output.tolist()) for item in after] == [("topk", [[3]])]
        else:
            assert before == after, name


def test_the_layout_is_that_of_tensorrt_llm() -> None:
    """Written by hand from `serialization.cpp` of release 1.0."""
    result = Result(is_final=True, output_token_ids=[[5, 6]], context_logits=LOGITS, decoding_iter=2)
    result.finish_reasons, result.is_sequence_final = [FinishReason.STOP_WORDS], True
    expected = (
        struct.pack("<?", True)
        + struct.pack("<QQii", 1, 2, 5, 6)  # one beam of two tokens
        + struct.pack("<??", False, False)  # log probabilities
        + struct.pack("<?iQqqiQff", True, 8, 2, 1, 2, 0, 8, 1.0, -2.0)  # float32 (8) [1, 2] on the CPU (0), 8 bytes
        + struct.pack("<???", False, False, False)  # logits of the output, fast logits, encoder
        + struct.pack("<Qi", 1, 2)
        + struct.pack("<?ifi??Q", False, 2, 1.0, 0, True, False, 0)
    )
    assert serialize_result(result) == expected
    assert deserialize_result(expected).output_token_ids == [[5, 6]]


@pytest.mark.parametrize("num_bytes", [0, 1, 9, 30, -1])
def test_bytes_that_are_not_a_result_are_refused(num_bytes: int) -> None:
    data = serialize_result(full_result())
    with pytest.raises(InvalidArgumentError, match="ends within a result"):
        deserialize_result(data[:num_bytes])
    with pytest.raises(InvalidArgumentError, match="more bytes"):
        deserialize_result(data + b"x")


def test_lengths_beyond_the_data_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ends within a result"):
        deserialize_result(struct.pack("<?Q", True, 1 << 60))
    tensor = struct.pack("<?Q???", True, 0, False, False, True)
    for shape, num_bytes in (((-1, -2), 8), ((2,), 4)):
        data = tensor + struct.pack(f"<iQ{len(shape)}qiQ", 8, len(shape), *shape, 0, num_bytes) + bytes(num_bytes)
        with pytest.raises(InvalidArgumentError, match="tensor"):
            deserialize_result(data)
    with pytest.raises(InvalidArgumentError, match="axes"):
        deserialize_result(tensor + struct.pack("<iQ", 8, 9))


def test_fast_logits_as_a_tensor() -> None:
    """The numbers are the memory of a structure: 8 bytes, 4 bytes, and 4 bytes of padding."""
    tensor = SpeculativeDecodingFastLogitsInfo(draft_request_id=0x3F800000, draft_participant_id=0x40000000).to_tensor()
    assert tensor.tolist() == [[1.0, 0.0, 2.0, 0.0]]


def final(tokens: tuple[int, ...], **more: Any) -> Chunk:
    return Chunk(
        0, 0, token_ids=tokens, is_sequence_final=True, is_final=True, finish_reason=ServiceReason.LENGTH, **more
    )


def test_the_first_phase_computes_one_token_and_names_it() -> None:
    request = Request([1, 2], 9, type=RequestType.REQUEST_TYPE_CONTEXT_ONLY)
    assert request.to_proto().max_tokens == 1
    (result,) = ResponseStream(request, request_id=5).add(final((7,)))
    assert result.context_phase_params == ContextPhaseParams([7], 5)
    # The end token is not part of the output, but it is that of the phase.
    request.end_id = 7
    chunk = final((7,), matched_stop=7)
    chunk.finish_reason = ServiceReason.STOP
    (result,) = ResponseStream(request, request_id=6).add(chunk)
    assert result.output_token_ids == [[1, 2]]
    assert result.context_phase_params == ContextPhaseParams([7], 6)


def test_the_second_phase_must_begin_with_the_token_of_the_first() -> None:
    request = Request([1, 2], 3, type=RequestType.REQUEST_TYPE_GENERATION_ONLY)
    request.context_phase_params = ContextPhaseParams([7], 5)
    assert request.to_proto().max_tokens == 3
    (result,) = ResponseStream(request).add(final((7, 8, 9)))
    assert result.output_token_ids == [[1, 2, 7, 8, 9]]
    assert result.context_phase_params is None
    with pytest.raises(InvalidArgumentError, match="begins with 8"):
        ResponseStream(request).add(final((8, 8, 9)))


def test_phases_that_do_not_fit_together_are_refused() -> None:
    first, second = RequestType.REQUEST_TYPE_CONTEXT_ONLY, RequestType.REQUEST_TYPE_GENERATION_ONLY
    params = ContextPhaseParams([7], 5)
    for request in (Request([1], 2, type=second), Request([1], 2, context_phase_params=params)):
        with pytest.raises(InvalidArgumentError, match="context_phase_params"):
            request.to_proto()
    with pytest.raises(UnsupportedError, match="opaque_state"):
        Request([1], 2, type=second, context_phase_params=ContextPhaseParams([7], 5, b"x")).to_proto()
    with pytest.raises(UnsupportedError, match="request_type"):
        Request([1], 2, type=first, sampling_config=SamplingConfig(2)).to_proto()


def test_a_result_says_whether_its_text_matches_a_schema() -> None:
    validation = Validation(("city: is missing",))
    (result,) = ResponseStream(Request([1, 2], 9)).add(final((7,), validation=validation))
    assert result.validations == [validation]
