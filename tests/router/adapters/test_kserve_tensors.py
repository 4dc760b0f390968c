"""Conversion of KServe tensors to fields of the native request."""

from __future__ import annotations

import numpy as np

from protos import generation_pb2 as pb
from protos import kserve_pb2
from router.protocols.kserve.ensemble import INPUTS
from router.protocols.kserve.tensors import parse_inputs

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
