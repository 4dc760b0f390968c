"""KServe's protocol v2 over HTTP, with Triton's extensions, as plain HTTP calls."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import struct
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from midstream.errors import InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import kserve_pb2
from router.authentication import Authenticator, TokenFile
from router.protocols.kserve.json_tensors import (
    BinaryOutputs,
    pack,
    read_generate,
    read_infer,
    render_generate,
    render_infer,
)
from router.protocols.kserve.tensors import OutputTensor, fill_outputs, unpack
from router.protocols.openai.body import Body
from tests.router.adapters.test_kserve import TEXT, answer_all
from tests.router.conftest import Cluster, Part

PATH = "/v2/models/smollm2"


async def http_of(router: Part) -> httpx.AsyncClient:
    assert router.http is not None
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http.port}", timeout=240)


async def test_generate_as_in_tritons_examples(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    answering = asyncio.create_task(answer_all(cluster, tokenizer))
    async with await http_of(router) as http:
        body: dict[str, Any] = {"text_input": "What is ML?", "max_tokens": 20, "bad_words": "", "stop_words": ""}
        answer = (await http.post("/v2/models/ensemble/generate", json=body)).raise_for_status().json()
        assert answer == {
            "model_name": "ensemble", "model_version": "1", "text_output": TEXT, "batch_index": 0, "sequence_index": 0,
        }  # fmt: skip
        nested = {"text_input": "x", "id": "5", "parameters": {"stream": False, "temperature": 0, "priority": 1}}
        answer = (await http.post("/v2/models/smollm2/versions/1/generate", json=nested)).raise_for_status().json()
        assert (answer["id"], answer["text_output"]) == ("5", TEXT)
        streamed = (await http.post("/v2/models/smollm2/generate_stream", json=body)).raise_for_status()
    answering.cancel()
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == TEXT
    assert {event["model_name"] for event in events} == {"smollm2"}
    first, second, third = (request.request for request in cluster.scheduler.requests.values())
    assert (first.max_tokens, first.streaming, list(first.stopping.stop_words)) == (20, False, [])
    assert (second.sampling.temperature, second.priority) == (0, 100)
    assert third.streaming


async def test_errors_are_texts(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, Any, int, str]] = [
        (f"{PATH}/generate", {"text_input": "x", "colour": 1}, 400, "colour: unknown input"),
        (f"{PATH}/generate", {"max_tokens": 5}, 400, "text_input: must be given"),
        (f"{PATH}/generate", {"text_input": "x", "stream": True}, 400, "stream: streaming is only supported by"),
        (f"{PATH}/generate", {"text_input": 5}, 400, "text_input: has an element that is not BYTES"),
        (f"{PATH}/generate", {"text_input": "x", "parameters": {"sequence_id": 1}}, 400, "parameters: 'sequence_id'"),
        (f"{PATH}/generate_stream", {"text_input": "x", "temperature": -1}, 400, "temperature: is -1; must"),
        ("/v2/models/other/generate_stream", {"text_input": "x"}, 404, "model_name: 'other' is not served here"),
        (f"{PATH}/versions/2/infer", {"inputs": []}, 404, "model_name: 'smollm2 version 2' is not served here"),
        (f"{PATH}/infer", {"input": []}, 400, "input: is not a field of this endpoint"),
        (f"{PATH}/infer?x=1", {"inputs": []}, 400, "x: is not a parameter of this endpoint"),
    ]
    async with await http_of(router) as http:
        for url, body, status, message in cases:
            answer = await http.post(url, json=body)
            assert (answer.status_code, answer.json()["error"][: len(message)]) == (status, message)
        assert (await http.get("/v2/models/other/ready")).status_code == 404
        assert (await http.get("/v2/models/smollm2/versions/2")).status_code == 404
        headers = {"Inference-Header-Content-Length": "x"}
        answer = await http.post(f"{PATH}/infer", content=b"{}", headers=headers)
        assert answer.json()["error"] == "Inference-Header-Content-Length: must be a whole number"
        answer = await http.post(f"{PATH}/infer", content=b"{}", headers={"Inference-Header-Content-Length": "3"})
        assert (answer.status_code, "2 bytes" in answer.json()["error"]) == (400, True)
        # As Triton's client sends it with request_compression_algorithm="gzip".
        answer = await http.post(f"{PATH}/infer", content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"][:16]) == (400, "Content-Encoding")


async def test_a_stream_that_fails_ends_with_an_error(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    async def fail() -> None:
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        (request_id,) = cluster.scheduler.requests
        cluster.scheduler.emit(request_id, tokenizer.encode(TEXT))
        cluster.scheduler.end(request_id, pb.FINISH_REASON_ABORT)

    async with await http_of(router) as http:
        call = http.post("/v2/models/smollm2/generate_stream", json={"text_input": "x"})
        streamed, _ = await asyncio.gather(call, fail())
    *events, last = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == TEXT
    assert "abort" in last["error"]


async def test_a_waiting_stream_has_events_without_text(cluster: Cluster, tokenizer: Tokenizer) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer(), keepalive_interval_s=0.05)
    body = {"text_input": "x"}
    async with await http_of(router) as http, http.stream("POST", PATH + "/generate_stream", json=body) as stream:
        texts: list[str] = []
        async for line in stream.aiter_lines():
            if not line.startswith("data: "):
                continue  # a comment, or the end of an event
            texts.append(json.loads(line.removeprefix("data: "))["text_output"])
            if texts == ["", ""]:  # two keep-alives
                (request_id,) = cluster.scheduler.requests
                cluster.scheduler.emit(request_id, tokenizer.encode(TEXT))
                cluster.scheduler.end(request_id)
    assert "".join(texts) == TEXT


async def test_a_call_with_a_key_is_answered_again(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    answering = asyncio.create_task(answer_all(cluster, tokenizer))
    async with await http_of(router) as http:
        for _ in range(2):
            answer = await http.post(
                "/v2/models/smollm2/generate", json={"text_input": "x"}, headers={"Idempotency-Key": "k"}
            )
            assert answer.raise_for_status().json()["text_output"] == TEXT
    answering.cancel()
    assert len(cluster.scheduler.requests) == 1


async def test_probes_need_no_key(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef01234567 alice")
    router = await cluster.add_router(authenticator=Authenticator(tokens=TokenFile(str(tmp_path / "tokens"))))
    async with await http_of(router) as http:
        assert (await http.get("/v2/health/live")).json() == {"live": True}
        assert (await http.get("/v2/health/ready")).json() == {"ready": True}
        refused = await http.get("/v2/models/smollm2")
        assert (refused.status_code, type(refused.json()["error"])) == (401, str)


def infer_body(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def test_elements_in_json_and_binary_elements_can_be_mixed() -> None:
    raw = np.array([[0.5, -2.0]], dtype=np.float32).tobytes()
    head = infer_body(
        {"name": "a", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "b", "datatype": "BYTES", "shape": [2, 1], "data": [["x"], ["é"]]},
        {"name": "c", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}},
        outputs=[{"name": "o", "parameters": {"binary_data": True}}],
        parameters={"timeout": 5},
    )
    request, binary = read_infer(head + raw + b"1234", len(head), "m", "")
    assert list(request.raw_input_contents) == [raw, b"\1\0\0\0x\2\0\0\0\xc3\xa9", b"1234"]
    assert [list(item.shape) for item in request.inputs] == [[1, 2], [2, 1], [2]]
    assert request.parameters["timeout"].int64_param == 5
    assert (binary.has("o"), binary.has("p")) == (True, False)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]), ("INT8", [-128, 127]), ("UINT8", [0, 255]), ("INT64", [-(1 << 63), (1 << 63) - 1]),
        ("UINT64", [0, (1 << 64) - 1]), ("FP32", [0.5, -1]), ("FP64", [0.1, 1e300]), ("BYTES", ["a", "", "日"]),
    ],
)  # fmt: skip
def test_elements_are_packed_as_they_are_unpacked(datatype: str, values: list[Any]) -> None:
    for data in (values, [[value] for value in values], [[values]]):
        found = [
            item.decode() if isinstance(item, bytes) else item for item in unpack(datatype, pack("t", datatype, data))
        ]
        assert found == values


def test_elements_may_be_nested_deeply() -> None:
    """Each takes the same time however deep it is; with recursion, it would take time for each level."""
    data: list[Any] = [1, [2], 3]
    for _ in range(5000):
        data = [data]
    assert list(unpack("INT32", pack("t", "INT32", data))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("datatype", "data", "error"),
    [
        ("BOOL", [1], InvalidArgumentError),
        ("INT8", [128], InvalidArgumentError),
        ("UINT8", [-1], InvalidArgumentError),
        ("INT32", [True], InvalidArgumentError),
        ("INT32", [1.0], InvalidArgumentError),
        ("INT64", [1 << 64], InvalidArgumentError),
        ("FP32", ["1"], InvalidArgumentError),
        ("BYTES", [1], InvalidArgumentError),
        ("BYTES", ["\ud800"], InvalidArgumentError),
        ("BYTES", [{}], InvalidArgumentError),
        ("FP16", [1.0], UnsupportedError),
        ("x", [1], UnsupportedError),
    ],
)
def test_elements_of_another_type_are_refused(datatype: str, data: object, error: type[MidstreamError]) -> None:
    with pytest.raises(error) as raised:
        pack("t", datatype, data)
    assert raised.value.field == "t"


@pytest.mark.parametrize(
    ("tensor", "tail", "field"),
    [
        ({"data": [1], "parameters": {"binary_data_size": 4}}, b"1234", "t"),
        ({"parameters": {"binary_data_size": 4}}, b"12345", "inputs"),
        ({"data": [1], "parameters": 5}, b"", "t"),
        ({"data": [1], "parameters": {"x": []}}, b"", "t"),
        ({"data": [1], "shape": ["1"]}, b"", "t"),
        ({"data": [1], "shape": [-1]}, b"", "t"),
        ({"data": [1], "colour": 1}, b"", "inputs[0].colour"),
    ],
)
def test_invalid_inputs_are_named(tensor: dict[str, Any], tail: bytes, field: str) -> None:
    head = infer_body({"name": "t", "datatype": "INT32", "shape": [1], **tensor})
    with pytest.raises(InvalidArgumentError) as raised:
        read_infer(head + tail, len(head), "m", "")
    assert raised.value.field == field


def test_outputs_in_json_have_no_infinity_and_binary_outputs_follow() -> None:
    response = kserve_pb2.ModelInferResponse(model_name="m", model_version="1", id="5")
    response.parameters["kind"].int64_param = 3
    fill_outputs(response, [OutputTensor.of_floats("a", [2], [0.5, -math.inf]), OutputTensor.of_texts("b", ["é"])])
    body, size = render_infer(response, BinaryOutputs(by_name={"b": True}))
    assert size is not None
    assert body[size:] == struct.pack("<I", 2) + "é".encode()
    assert json.loads(body[:size]) == {
        "model_name": "m", "model_version": "1", "id": "5", "parameters": {"kind": 3},
        "outputs": [
            {"name": "a", "datatype": "FP32", "shape": [2], "data": [0.5, -3.4028234663852886e38]},
            {"name": "b", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
        ],
    }  # fmt: skip
    assert render_generate(response) == {
        "model_name": "m", "model_version": "1", "id": "5", "kind": 3, "a": [0.5, -3.4028234663852886e38], "b": "é",
    }  # fmt: skip


def test_values_of_generate_are_one_row() -> None:
    body = Body({"text_input": "x", "stop_words": ["a", "b"], "prompt_embedding_table": [[1, 2], [3, 4]], "seed": None})
    request = read_generate(body, "m", "", is_stream=False)
    assert [(item.name, list(item.shape)) for item in request.inputs] == [
        ("text_input", [1, 1]), ("stop_words", [1, 2]), ("prompt_embedding_table", [1, 2, 2]),
    ]  # fmt: skip
