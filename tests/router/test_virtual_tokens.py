"""The validation of prompt embeddings, and the request that the scheduler receives."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import InvalidArgumentError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.request_checks import check_request
from router.pipeline.virtual_tokens import put_table_first, take_embeddings

VOCAB, HIDDEN = 49152, 576


def tensor(rows: int = 3, **fields: Any) -> pb.Tensor:
    known = {"dtype": pb.Tensor.DTYPE_FLOAT16, "shape": [rows, HIDDEN], "data": bytes(rows * HIDDEN * 2)}
    return pb.Tensor(**{**known, **fields})


def tuned(table: pb.Tensor | None = None, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(table=table), **fields)


RESOLVED = pb.ResolvedAdapter(fingerprint="x")
BAD = [
    ("prompt_embeddings.dtype", pb.GenerateRequest(prompt_embeddings=tensor(dtype=pb.Tensor.DTYPE_INT32))),
    ("prompt_embeddings.shape", pb.GenerateRequest(prompt_embeddings=tensor(shape=[3, 575]))),
    ("prompt_embeddings.shape", pb.GenerateRequest(prompt_embeddings=tensor(shape=[0, HIDDEN]))),
    ("prompt_embeddings.shape", pb.GenerateRequest(prompt_embeddings=tensor(shape=[8193, HIDDEN]))),
    ("prompt_embeddings.shape", pb.GenerateRequest(prompt_embeddings=tensor(shape=[2**60, HIDDEN]))),
    ("prompt_embeddings.shape", pb.GenerateRequest(prompt_embeddings=tensor(shape=[3 * HIDDEN]))),
    ("prompt_embeddings.data", pb.GenerateRequest(prompt_embeddings=tensor(data=b"1"))),
    ("prompt_embeddings.data_offset", pb.GenerateRequest(prompt_embeddings=tensor(data_offset=8))),
    (
        "prompt_embeddings",
        pb.GenerateRequest(prompt_embeddings=tensor(), prompt_tuning=pb.PromptTuningConfig(name="x")),
    ),
    ("prompt_tuning.table.dtype", tuned(tensor(dtype=pb.Tensor.DTYPE_UNSPECIFIED))),
    ("prompt_tuning.table.shape", tuned(tensor(shape=[1, 3, HIDDEN]))),
    ("prompt_tuning.table.data", tuned(tensor(data=bytes(3 * HIDDEN * 2 + 1)))),
    ("prompt_tuning", tuned()),
    (
        "prompt_tuning.path",
        pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(table=tensor(), path="/x")),
    ),
    (
        "prompt_tuning.resolved",
        pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(name="x", resolved=RESOLVED)),
    ),
    ("prompt_tuning.name", pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(name="x" * 129))),
    ("token_ids", tuned(tensor(), token_ids=pb.TokenIds(values=[VOCAB + 3]))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(values=[VOCAB]))),
    ("output.prompt_log_probs", tuned(tensor(), output=pb.OutputConfig(prompt_log_probs=0))),
    ("output.exclude_input_from_output", tuned(tensor(), output=pb.OutputConfig(exclude_input_from_output=False))),
    ("lora.resolved", pb.GenerateRequest(lora=pb.LoraConfig(name="x", resolved=RESOLVED))),
]


@pytest.mark.parametrize(("field", "request_"), BAD)
def test_a_wrong_one_is_refused_by_name(folder: ModelFolder, field: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        check_request(request_, folder)
    assert raised.value.field == field


@pytest.mark.parametrize("dtype", [pb.Tensor.DTYPE_FLOAT32, pb.Tensor.DTYPE_FLOAT16, pb.Tensor.DTYPE_BFLOAT16])
def test_each_type_is_taken(folder: ModelFolder, dtype: pb.Tensor.Dtype.ValueType) -> None:
    size = 4 if dtype == pb.Tensor.DTYPE_FLOAT32 else 2
    values = tensor(dtype=dtype, data=bytes(3 * HIDDEN * size))
    check_request(tuned(values, token_ids=pb.TokenIds(values=[VOCAB + 2, 5, VOCAB])), folder)
    check_request(pb.GenerateRequest(prompt_embeddings=values), folder)


def test_a_prompt_of_embeddings_becomes_a_table_with_all_its_rows(folder: ModelFolder) -> None:
    request = pb.GenerateRequest(prompt_embeddings=tensor(rows=4))
    take_embeddings(request, folder)
    assert request.prompt_tuning.table == tensor(rows=4)
    assert request.token_ids.values[:] == [VOCAB, VOCAB + 1, VOCAB + 2, VOCAB + 3]
    assert put_table_first(request, request.token_ids.values, folder) == request.token_ids.values


def test_a_table_precedes_a_prompt_without_virtual_ids(folder: ModelFolder) -> None:
    request = tuned(tensor(rows=2))
    assert put_table_first(request, [7, 8], folder) == [VOCAB, VOCAB + 1, 7, 8]
    assert put_table_first(request, [7, VOCAB + 1, 8], folder) == [7, VOCAB + 1, 8]
    assert put_table_first(pb.GenerateRequest(), [7, 8], folder) == [7, 8]
