"""KServe's clients, and Triton's for HTTP, in a separate process: they have other requirements and protobuf code of
their own.

PYTHON -m tests.router.adapters.kserve_client GRPC_PORT HTTP_PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import httpx
import kserve
import numpy as np
import tritonclient.http as triton
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

MODEL = "smollm2"


def kserve_inputs(text: str, *, is_binary: bool) -> list[Any]:
    inputs = [
        kserve.InferInput(name="text_input", shape=[1, 1], datatype="BYTES"),
        kserve.InferInput(name="max_tokens", shape=[1, 1], datatype="INT32"),
    ]
    arrays = np.array([[text.encode()]], dtype=np.object_), np.array([[16]], dtype=np.int32)
    for item, values in zip(inputs, arrays, strict=True):
        item.set_data_from_numpy(values, binary_data=is_binary)
    return inputs


def triton_inputs(text: str, *, is_binary: bool = True, **more: Any) -> list[Any]:
    inputs = []
    for name, datatype, values in (
        ("text_input", "BYTES", np.array([[text.encode()]], dtype=np.object_)),
        ("max_tokens", "INT32", np.array([[16]], dtype=np.int32)),
        *((name, "FP32", np.array([[value]], dtype=np.float32)) for name, value in more.items()),
    ):
        inputs.append(triton.InferInput(name, list(values.shape), datatype))
        inputs[-1].set_data_from_numpy(values, binary_data=is_binary)
    return inputs


def texts(array: Any) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1)]


async def ask_kserve(grpc_port: str, url: str) -> dict[str, object]:
    client = InferenceGRPCClient(f"127.0.0.1:{grpc_port}")
    inputs = kserve_inputs("grpc", is_binary=True)
    answer = await client.infer(kserve.InferRequest(model_name=MODEL, infer_inputs=inputs))
    found = {"grpc": texts(answer.outputs[0].as_numpy()), "is_binary": "binary_data_size" in inputs[0].parameters}
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as first:
        found["ready_v1"] = await first.is_model_ready(url, MODEL)
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest:
        found["live"] = await rest.is_server_live(url)
        found["ready"] = [await rest.is_server_ready(url), await rest.is_model_ready(url, MODEL)]
        found["other_ready"] = await rest.is_model_ready(url, "other")
        for is_binary in (False, True):
            request = kserve.InferRequest(
                model_name=MODEL, infer_inputs=kserve_inputs("rest", is_binary=is_binary), request_id="7"
            )
            answer = await rest.infer(url, request, model_name=MODEL)
            outputs = {output.name: output for output in answer.outputs}
            found[f"rest_{is_binary}"] = [answer.id, texts(outputs["text_output"].as_numpy())]
        wrong = kserve.InferRequest(model_name=MODEL, infer_inputs=kserve_inputs("", is_binary=True)[1:])
        try:
            await rest.infer(url, wrong, model_name=MODEL)
        except httpx.HTTPStatusError as failure:
            found["error"] = str(failure)
    return found


def ask_triton(address: str) -> dict[str, object]:
    client = triton.InferenceServerClient(address)
    found: dict[str, object] = {
        "live": client.is_server_live(),
        "ready": [client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("ensemble", "1")],
        "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata(),
        "model": client.get_model_metadata(MODEL),
        "config": client.get_model_config(MODEL, "1"),
    }
    result = client.infer(MODEL, triton_inputs("binary"), request_id="a", priority=3, timeout=60_000_000)
    found["binary"] = [texts(result.as_numpy("text_output")), result.get_response()["id"]]
    found["index"] = result.as_numpy("sequence_index").tolist()
    wanted = [triton.InferRequestedOutput("text_output", binary_data=False)]
    result = client.infer("ensemble", triton_inputs("json", is_binary=False, temperature=0.5), outputs=wanted)
    found["json"] = result.get_response()["outputs"]
    wanted.append(triton.InferRequestedOutput("sequence_index"))
    result = client.infer(MODEL, triton_inputs("both"), outputs=wanted, model_version="1")
    found["both"] = [texts(result.as_numpy("text_output")), result.as_numpy("sequence_index").tolist()]
    for name, model, inputs in (
        ("unknown_model", "other", triton_inputs("x")),
        ("unknown_input", MODEL, triton_inputs("x", colour=1.0)),
        ("wrong_value", MODEL, triton_inputs("x", temperature=-1.0)),
    ):
        try:
            client.infer(model, inputs)
        except triton.InferenceServerException as failure:
            found[name] = [failure.status(), failure.message()]
    return found


def main() -> None:
    address = f"127.0.0.1:{sys.argv[2]}"
    report = {
        "version": version("kserve"),
        "kserve": asyncio.run(ask_kserve(sys.argv[1], f"http://{address}")),
        "triton": ask_triton(address),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
