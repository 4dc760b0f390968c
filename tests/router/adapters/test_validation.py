"""Every API says whether an output matches its schema, if a grammar cannot enforce all of it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import openai
import pytest

from midstream.client import AsyncClient, Guide
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import kserve_pb2_grpc, openengine_pb2_grpc
from protos import openengine_pb2 as oe
from router.parsers.formats import TOOL_FORMATS, ModelFormat
from router.pipeline.output_checks import OutputValidator, Part
from router.protocols.conversation import ChatModel
from tests.router.adapters.sse import post_stream
from tests.router.adapters.test_kserve import infer_request
from tests.router.conftest import Cluster
from tests.router.conftest import Part as RouterPart

# A grammar cannot enforce the lookahead.
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!b)"}}, "required": ["a"]}
LENIENT = json.dumps({**SCHEMA, "x-guidance": {"lenient": True}})
VALID, INVALID, CUT = '{"a": "c"}', '{"a": "b"}', '{"a": "c'
RESULTS = {
    VALID: {"is_valid": True, "errors": []},
    INVALID: {"is_valid": False, "errors": ["a: 'b' does not match '^(?!b)'"]},
    CUT: {
        "is_valid": False,
        "errors": ["is not complete JSON: Unterminated string starting at: line 1 column 7 (char 6)"],
    },
}
FORMAT = {"name": "x", "schema": SCHEMA, "strict": False}
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "/v1/chat/completions": {"messages": HI, "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 16,
        "output_config": {"format": {"type": "json_schema", "schema": json.loads(LENIENT)}},
    },
    "/v1/responses": {"input": "Hi", "text": {"format": {"type": "json_schema", **FORMAT}}},
}
FUNCTION = {"name": "put", "parameters": SCHEMA}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/messages": [{"name": "put", "input_schema": SCHEMA}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
}
Answer = Callable[[str], None]


@pytest.fixture
async def router(cluster: Cluster) -> RouterPart:
    chat = ChatModel(ModelFormat(TOOL_FORMATS["hermes"]), "tools")
    return await cluster.add_router(await cluster.add_detokenizer(), chat=chat)


@pytest.fixture
async def answer(cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[Answer]:
    """Yield a function that sets the text with which requests are answered."""
    texts, answered = [""], set[str]()

    async def run() -> None:
        while True:
            await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
            for request_id in set(cluster.scheduler.requests) - answered:
                answered.add(request_id)
                for token in tokenizer.encode(texts[-1]):
                    cluster.scheduler.emit(request_id, [token])
                cluster.scheduler.end(request_id, pb.FINISH_REASON_STOP)

    running = asyncio.create_task(run())
    yield texts.append
    running.cancel()


def results_in(value: Any) -> list[object]:
    """Return the values of the field, wherever it is."""
    if isinstance(value, list):
        return [item for part in value for item in results_in(part)]
    if not isinstance(value, dict):
        return []
    own = [value["validation"]] if "validation" in value else []
    return own + [item for part in value.values() for item in results_in(part)]


async def post(router: RouterPart, path: str, body: dict[str, Any], *, stream: bool = False) -> list[object]:
    """Return the results in a response, or in its events."""
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}{path}"
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    content = json.dumps({**body, "stream": stream, "model": "smollm2"}).encode()

    def send() -> str:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=240) as response:
            return str(response.read().decode())

    text = await asyncio.to_thread(send)
    if not stream:
        return results_in(json.loads(text))
    return [
        found
        for line in text.splitlines()
        if line.startswith("data: {")
        for found in results_in(json.loads(line.removeprefix("data: ")))
    ]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_validated(router: RouterPart, answer: Answer, path: str, *, stream: bool) -> None:
    for text, result in RESULTS.items():
        answer(text)
        assert await post(router, path, BODIES[path], stream=stream) == [result]


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_is_validated_that_a_grammar_enforces(router: RouterPart, answer: Answer, path: str) -> None:
    answer('{"a": "c"}')
    text = json.dumps(BODIES[path]).replace('"strict": false', '"strict": true').replace("^(?!b)", "^c")
    assert await post(router, path, json.loads(text.replace('"lenient": true', '"lenient": false'))) == []


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_that_are_not_strict_are_validated(
    router: RouterPart, answer: Answer, path: str, *, stream: bool
) -> None:
    body = {name: value for name, value in BODIES[path].items() if name in ("messages", "max_tokens", "input")}
    body["tools"] = TOOLS[path]
    answer("No call.")
    assert await post(router, path, body, stream=stream) == []
    answer(f'<tool_call>\n{{"name": "put", "arguments": {VALID}}}\n</tool_call>')
    assert await post(router, path, body, stream=stream) == [RESULTS[VALID]]
    call = f'<tool_call>\n{{"name": "put", "arguments": {INVALID}}}\n</tool_call>'
    answer(call + "\n" + call.replace('"b"', "3"))
    errors = ["call 0 (put): a: 'b' does not match '^(?!b)'", "call 1 (put): a: 3 is not of type 'string'"]
    assert await post(router, path, body, stream=stream) == [{"is_valid": False, "errors": errors}]


async def test_strict_tools_are_validated_only_where_no_grammar_restricts_them(
    router: RouterPart, cluster: Cluster, answer: Answer
) -> None:
    path, schema = "/v1/chat/completions", {**SCHEMA, "properties": {"a": {"type": "string", "pattern": "^c"}}}
    tool = {"type": "function", "function": {"name": "put", "parameters": schema, "strict": True}}
    answer(f'<tool_call>\n{{"name": "put", "arguments": {VALID}}}\n</tool_call>')
    assert await post(router, path, {"messages": HI, "tools": [tool]}) == []
    # Its strings are written without quotes, so that a grammar does not restrict them by patterns.
    chat = ChatModel(ModelFormat(TOOL_FORMATS["qwen3_coder"]), "tools")
    other = await cluster.add_router(await cluster.add_detokenizer(), chat=chat)
    answer("<tool_call>\n<function=put>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>")
    errors = ["call 0 (put): a: 'b' does not match '^c'"]
    assert await post(other, path, {"messages": HI, "tools": [tool]}) == [{"is_valid": False, "errors": errors}]


async def test_an_invalid_schema_of_one_tool_does_not_refuse_a_required_call_of_another(
    router: RouterPart, cluster: Cluster, answer: Answer
) -> None:
    path = "/v1/chat/completions"
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": "strin"}}}}}
    body = {"messages": HI, "tools": [*TOOLS[path], odd], "tool_choice": "required"}
    answer(f'[{{"name": "put", "parameters": {VALID}}}]')
    assert await post(router, path, body) == [RESULTS[VALID]]
    (script,) = cluster.scheduler.requests.values()
    assert "strin" not in script.request.guided_decoding.guide.replace("string", "")
    assert '"name": {"const": "odd"}' in script.request.guided_decoding.guide
    answer('[{"name": "odd", "parameters": {"a": 1}}]')
    (result,) = await post(router, path, body)
    assert isinstance(result, dict)
    assert result["errors"] == [
        "call 0 (odd): the schema is invalid: 'strin' is not valid under any of the given schemas"
    ]
    strict = {"type": "function", "function": {**odd["function"], "strict": True}}  # type: ignore[dict-item]
    for tools in ([*TOOLS[path], strict], [odd]):
        with pytest.raises(urllib.error.HTTPError) as raised:
            await post(router, path, {**body, "tools": tools})
        assert raised.value.code == 400
        assert json.load(raised.value)["error"]["param"].endswith("function.parameters")


async def test_a_stream_that_is_resumed_is_validated_as_a_whole(
    router: RouterPart, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    assert router.http is not None
    path, ids = "/v1/chat/completions", tokenizer.encode(INVALID)
    body = {**BODIES[path], "request_id": "r", "stream": True}
    async with post_stream(router.http.port, path, body) as stream:
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        cluster.scheduler.emit("r", ids[:3])
        async for event in stream.events():
            if event["choices"][0]["delta"].get("content"):
                break
        async with post_stream(router.http.port, path, body, stream.last_id) as rest:
            cluster.scheduler.emit("r", ids[3:])
            cluster.scheduler.end("r", pb.FINISH_REASON_STOP)
            found = [result async for event in rest.events() for result in results_in(event)]
    assert found == [RESULTS[INVALID]]


async def test_batches(router: RouterPart, answer: Answer) -> None:
    answer(INVALID)
    assert router.http is not None
    body = {**BODIES["/v1/chat/completions"], "model": "smollm2"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{router.http.port}/v1", api_key="none", max_retries=0
    ) as client:
        file = await client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(240):
            while batch.output_file_id is None:
                await asyncio.sleep(0.05)  # the API has no way to wait
                batch = await client.batches.retrieve(batch.id)
        content = await client.files.content(batch.output_file_id)
    assert results_in(json.loads(content.text)) == [RESULTS[INVALID]]


async def test_native(
    router: RouterPart, answer: Answer, cluster: Cluster, open_client: Callable[..., AsyncClient]
) -> None:
    client = open_client(router)
    for number, (text, expected) in enumerate(RESULTS.items()):
        answer(text)
        request_id = f"native-{number}"
        stream = client.generate("Hi", request_id=request_id, guided=Guide(json_schema=LENIENT))
        chunks = [chunk async for chunk in stream]
        found = chunks[-1].validation
        assert found is not None
        assert {"is_valid": found.is_valid, "errors": list(found.errors)} == expected
        # Another stream of the same request, which does not have the beginning.
        resumed = [chunk async for chunk in client.resume(request_id, from_token=2)]
        assert resumed[-1].validation == found
    stream = client.generate("Hi", request_id="enforced", guided=Guide(json_schema={"type": "object"}))
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].validation is None
    resumed = [chunk async for chunk in client.resume("enforced", from_token=2)]
    assert resumed[-1].validation is None


async def test_kserve(router: RouterPart, answer: Answer) -> None:
    guide = {"guided_decoding_guide_type": b"json_schema", "guided_decoding_guide": LENIENT.encode()}
    answer(INVALID)
    request = infer_request(**{name: ("BYTES", value) for name, value in guide.items()})
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        whole = await stub.ModelInfer(request, timeout=240)
        streamed = [part async for part in stub.ModelStreamInfer(iter([request]), timeout=240)]
    for response in (whole, streamed[-1].infer_response):
        assert response.parameters["output_is_valid"].bool_param is False
        assert json.loads(response.parameters["output_errors"].string_param) == [
            "sequence 0: a: 'b' does not match '^(?!b)'"
        ]


async def test_openengine(router: RouterPart, answer: Answer) -> None:
    answer(INVALID)
    request = oe.GenerateRequest(prompt="Hi", guided=oe.GuidedDecoding(json_schema=LENIENT))
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = openengine_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, timeout=240)
        assert [event async for event in call]
        metadata = dict(await call.trailing_metadata())
    assert json.loads(str(metadata["midstream-validation"])) == {"output_index": 0, **RESULTS[INVALID]}


async def test_a_validation_that_takes_too_long_fails_only_its_own_output() -> None:
    validator = OutputValidator(limit_s=0.5)
    slow = Part("", json.dumps({"items": {"type": "string"}}), json.dumps(["a"] * 300_000))
    quick = Part("", json.dumps({"type": "string"}), "3")
    results = await asyncio.gather(*(validator.validate([part]) for part in (slow, quick)))
    assert [result.errors for result in results] == [
        ("cannot be validated: takes more than 0.5 s",),
        ("3 is not of type 'string'",),
    ]
    validator.close()
