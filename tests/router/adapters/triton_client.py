"""The official Triton client, in a separate process because its generated protobuf code has the same names as ours.

python -m tests.router.adapters.triton_client ADDRESS
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray


def inputs(text: str, *, stream: bool, **more: float) -> list[triton.InferInput]:
    tensors = [tensor("text_input", "BYTES", [[text.encode()]]), tensor("max_tokens", "INT32", [[16]])]
    tensors.append(tensor("stream", "BOOL", [[stream]]))
    tensors.append(tensor("stop_words", "BYTES", [[b"never", b""]]))
    tensors += [tensor(name, "FP32", [[value]]) for name, value in more.items()]
    return tensors


def tensor(name: str, datatype: str, values: list[list[object]]) -> triton.InferInput:
    array: NDArray[Any] = np.array(values, dtype=_TYPES[datatype])
    item = triton.InferInput(name, list(array.shape), datatype)
    item.set_data_from_numpy(array)
    return item


_TYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}


def texts(result: triton.InferResult) -> list[str]:
    return [item.decode() for item in result.as_numpy("text_output").reshape(-1)]


def main() -> None:
    client = triton.InferenceServerClient(sys.argv[1])
    report: dict[str, object] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready() and client.is_model_ready("ensemble"),
        "unknown_ready": client.is_model_ready("other"),
        "name": client.get_server_metadata().name,
        "inputs": [item.name for item in client.get_model_metadata("ensemble").inputs],
        "decoupled": client.get_model_config("ensemble").config.model_transaction_policy.decoupled,
    }
    result = client.infer("ensemble", inputs("whole", stream=False, temperature=0.5), request_id="7")
    report["whole"] = [texts(result), result.get_response().id, result.as_numpy("sequence_index").tolist()]
    batch = [tensor("text_input", "BYTES", [[b"first"], [b"second"]]), tensor("max_tokens", "INT32", [[16], [16]])]
    result = client.infer("smollm2", batch)
    report["batch"] = [texts(result), result.as_numpy("batch_index").tolist()]
    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("ensemble", inputs("streamed", stream=True), request_id="a")
    text, final = "", False
    while not final:
        result, error = answers.get(timeout=240)
        assert error is None, error
        assert result is not None
        text += texts(result)[0]
        final = result.get_response().parameters["triton_final_response"].bool_param
    report["streamed"] = text
    client.async_stream_infer("ensemble", inputs("bad", stream=True, temperature=-1.0), request_id="b")
    report["stream_error"] = str(answers.get(timeout=240)[1])
    client.stop_stream()
    for name, model, tensors in (
        ("unknown_model", "other", inputs("x", stream=False)),
        ("unknown_input", "ensemble", [*inputs("x", stream=False), tensor("colour", "FP32", [[1.0]])]),
        ("no_text", "ensemble", [tensor("max_tokens", "INT32", [[4]])]),
    ):
        try:
            client.infer(model, tensors)
        except triton.InferenceServerException as failure:
            report[name] = f"{failure.status()} {failure.message()}"
    client.infer("ensemble", inputs("urgent", stream=False), priority=3, timeout=60_000_000)
    statistics = client.get_inference_statistics("ensemble").model_stats[0].inference_stats
    report["counts"] = [statistics.success.count, statistics.fail.count]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
