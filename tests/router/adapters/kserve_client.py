"""KServe's own client, in a separate process: it has other requirements and its own protobuf code.

PYTHON -m tests.router.adapters.kserve_client GRPC_PORT HTTP_PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

import kserve
import numpy as np
import tritonclient.http as triton
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig


async def main() -> None:
    client = InferenceGRPCClient(f"127.0.0.1:{sys.argv[1]}")
    texts = np.array([[b"first"]], dtype=np.object_)
    tokens = np.array([[16]], dtype=np.int32)
    inputs = [
        kserve.InferInput(name="text_input", shape=[1, 1], datatype="BYTES"),
        kserve.InferInput(name="max_tokens", shape=[1, 1], datatype="INT32"),
    ]
    for item, values in zip(inputs, (texts, tokens), strict=True):
        item.set_data_from_numpy(values)
    answer = await client.infer(kserve.InferRequest(model_name="smollm2", infer_inputs=inputs))
    found = {output.name: output for output in answer.outputs}
    url = f"http://127.0.0.1:{sys.argv[2]}"
    http = triton.InferenceServerClient(f"127.0.0.1:{sys.argv[2]}")
    try:
        http.get_server_metadata()
    except triton.InferenceServerException as failure:
        error = str(failure)
    report = {
        "v2": error,
        "version": version("kserve"),
        "binary": all("binary_data_size" in item.parameters for item in inputs),
        "texts": [text.decode() for text in found["text_output"].as_numpy().reshape(-1)],
        "ready": await InferenceRESTClient(RESTConfig(protocol="v1")).is_model_ready(url, "smollm2"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(main())
