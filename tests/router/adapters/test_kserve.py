"""The official Triton client, with a router on a real socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import kserve_pb2, kserve_pb2_grpc
from router.protocols.kserve import servicer
from router.protocols.kserve.ensemble import tensor_of
from router.protocols.kserve.parameters import Parameters, read_parameters
from router.protocols.openai.structural_tags import structural_body, structural_grammar
from tests.router.conftest import Cluster

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub

KSERVE_PYTHON = os.environ.get("MIDSTREAM_KSERVE_PYTHON", "")
TEXT = "Every part may die 🫠 and the text goes on."


async def answer_all(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """Respond to every request with TEXT, in two pieces."""
    ids = tokenizer.encode(TEXT)
    answered: set[str] = set()
    while True:
        await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
        for request_id in set(cluster.scheduler.requests) - answered:
            answered.add(request_id)
            cluster.scheduler.emit(request_id, ids[:5])
            cluster.scheduler.emit(request_id, ids[5:])
            cluster.scheduler.end(request_id)


async def test_the_official_client(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """The response to every request is TEXT, in two pieces."""
    router = await cluster.add_router(await cluster.add_detokenizer())
    command = [sys.executable, "-m", "tests.router.adapters.triton_client", router.address]
    client = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    answering = asyncio.create_task(answer_all(cluster, tokenizer))
    output, errors = await client.communicate()
    answering.cancel()
    assert client.returncode == 0, errors.decode()
    report = json.loads(output)
    assert report["live"]
    assert report["ready"]
    assert not report["unknown_ready"]
    assert report["name"] == "midstream"
    assert {"text_input", "max_tokens", "beam_width", "lora_task_id"} <= set(report["inputs"])
    assert report["decoupled"]
    assert report["whole"] == [[TEXT], "7", [0]]
    assert report["batch"] == [[TEXT, TEXT], [0, 1]]
    assert report["streamed"] == TEXT
    assert "temperature" in report["stream_error"]
    assert report["unknown_model"].startswith("StatusCode.NOT_FOUND")
    assert "colour" in report["unknown_input"]
    assert "text_input" in report["no_text"]
    assert report["counts"] == [4, 4]
    natives = [request.request for request in cluster.scheduler.requests.values()]
    assert sorted(native.streaming for native in natives) == [False, False, False, False, True]
    (urgent,) = [native for native in natives if native.priority]
    assert urgent.priority == 98
    assert 50_000 < urgent.timeout_ms <= 60_000
    assert {native.max_tokens for native in natives} == {16}
    assert [list(native.stopping.stop_words) for native in natives].count(["never"]) == 3


@pytest.mark.skipif(not KSERVE_PYTHON, reason="MIDSTREAM_KSERVE_PYTHON is not set (kserve, tritonclient[http])")
async def test_the_clients_of_kserve_and_triton_for_http(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """The response to every request is TEXT."""
    router = await cluster.add_router(await cluster.add_detokenizer())
    assert router.http is not None
    command = [KSERVE_PYTHON, "-m", "tests.router.adapters.kserve_client", str(router.server.port)]
    client = await asyncio.create_subprocess_exec(
        *command, str(router.http.port), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    answering = asyncio.create_task(answer_all(cluster, tokenizer))
    output, errors = await client.communicate()
    answering.cancel()
    assert client.returncode == 0, errors.decode()
    report = json.loads(output)
    assert report["version"] == "0.21.0"
    kserve, triton = report["kserve"], report["triton"]
    assert (kserve["grpc"], kserve["is_binary"], kserve["ready_v1"]) == ([TEXT], True, True)
    assert (kserve["live"], kserve["ready"], kserve["other_ready"]) == (True, [True, True], False)
    assert kserve["rest_False"] == kserve["rest_True"] == ["7", [TEXT]]
    assert kserve["error"].startswith("text_input: must be given, '400 Bad Request'")
    assert (triton["live"], triton["ready"], triton["other_ready"]) == (True, [True, True, True], False)
    assert triton["server"]["name"] == "midstream"
    assert {"binary_tensor_data", "generate"} <= set(triton["server"]["extensions"])
    assert (triton["model"]["name"], triton["model"]["versions"]) == ("smollm2", ["1"])
    assert triton["model"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert triton["config"]["model_transaction_policy"] == {"decoupled": True}
    assert triton["config"]["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    assert (triton["binary"], triton["index"]) == ([[TEXT], "a"], [0])
    assert triton["json"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [TEXT]}]
    assert triton["both"] == [[TEXT], [0]]
    assert triton["unknown_model"] == ["404", "model_name: 'other' is not served here; the model is 'smollm2'"]
    assert triton["unknown_input"] == ["400", "colour: unknown input"]
    assert triton["wrong_value"][1].startswith("temperature: is -1; must")
    natives = [request.request for request in cluster.scheduler.requests.values()]
    assert len(natives) == 6
    (urgent,) = [native for native in natives if native.priority]
    assert urgent.priority == 98
    assert 50_000 < urgent.timeout_ms <= 60_000
    assert {native.max_tokens for native in natives} == {16}


async def test_an_error_below_v2_is_a_text(cluster: Cluster) -> None:
    router = await cluster.add_router()
    assert router.http is not None
    for path, kind in (("/v2/nothing", str), ("/v2/rerank/x", dict), ("/v3", dict)):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http.port)
        writer.write(f"GET {path} HTTP/1.0\r\nHost: a\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 404 " in head
        assert isinstance(json.loads(body)["error"], kind)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"timeout": kserve_pb2.InferParameter(int64_param=-1)}, "timeout"),
        ({"timeout": kserve_pb2.InferParameter(string_param="1")}, "timeout"),
        ({"priority": kserve_pb2.InferParameter(bool_param=True)}, "priority"),
        ({"binary_data_output": kserve_pb2.InferParameter(int64_param=1)}, "binary_data_output"),
        ({"sequence_id": kserve_pb2.InferParameter(int64_param=1)}, "parameters"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, kserve_pb2.InferParameter], field: str) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
        read_parameters(kserve_pb2.ModelInferRequest(parameters=parameters))
    assert raised.value.field == field


def test_parameters_that_describe_the_encoding_must_be_true() -> None:
    request = kserve_pb2.ModelInferRequest(raw_input_contents=[b"1234"])
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.parameters["binary_data_size"].int64_param = 4
    request.outputs.add(name="text_output").parameters["binary_data"].bool_param = True
    request.parameters["binary_data_output"].bool_param = True
    assert read_parameters(request) == Parameters()
    tensor.parameters["binary_data_size"].int64_param = 5
    with pytest.raises(InvalidArgumentError, match="has 4 bytes"):
        read_parameters(request)
    del request.raw_input_contents[:]
    with pytest.raises(UnsupportedError, match="binary_data_size"):
        read_parameters(request)


def test_of_the_numbered_priorities_one_is_the_highest_and_none_the_lowest() -> None:
    def priority(number: int) -> int:
        parameters = {"priority": kserve_pb2.InferParameter(uint64_param=number)}
        return read_parameters(kserve_pb2.ModelInferRequest(parameters=parameters)).priority

    assert [priority(number) for number in (1, 2, 100, 0, 500)] == [100, 99, 1, 0, -100]


_CONTENTS = {"BYTES": "bytes_contents", "INT32": "int_contents", "UINT64": "uint64_contents", "BOOL": "bool_contents"}
_CONTENTS |= {"FP32": "fp32_contents"}


def infer_request(*outputs: str, **inputs: tuple[str, Any]) -> kserve_pb2.ModelInferRequest:
    """Return a request with one row; `inputs` are the type and value of each input."""
    request = kserve_pb2.ModelInferRequest(model_name="ensemble")
    for name, (datatype, value) in {"text_input": ("BYTES", b"Hi"), "max_tokens": ("INT32", 9), **inputs}.items():
        item = request.inputs.add(name=name, datatype=datatype, shape=(1, 1))
        getattr(item.contents, _CONTENTS[datatype]).append(value)
    for name in outputs:
        request.outputs.add(name=name)
    return request


async def sent(cluster: Cluster, request: kserve_pb2.ModelInferRequest) -> pb.GenerateRequest:
    """Return the native request that the scheduler gets. Raises AioRpcError if the router refuses it."""

    async def answer() -> pb.GenerateRequest:
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        (script,) = cluster.scheduler.requests.values()
        cluster.scheduler.end(script.request.request_id)
        return script.request

    router = await cluster.add_router(await cluster.add_detokenizer())
    answering = asyncio.create_task(answer())
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        try:
            await stub.ModelInfer(request, timeout=240)
        except grpc.aio.AioRpcError:
            answering.cancel()
            raise
    return await answering


async def refusal(cluster: Cluster, request: kserve_pb2.ModelInferRequest) -> str:
    """Return the message with which a request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await sent(cluster, request)
    return str(raised.value.details())


@pytest.mark.parametrize(
    ("output", "field", "value"),
    [
        ("output_log_probs", "log_probs", 0),
        ("cum_log_probs", "log_probs", 0),
        ("context_logits", "return_context_logits", True),
        ("generation_logits", "return_generation_logits", True),
    ],
)
async def test_naming_an_output_asks_for_it(cluster: Cluster, output: str, field: str, value: object) -> None:
    native = await sent(cluster, infer_request("text_output", output))
    assert {item.name: given for item, given in native.output.ListFields()}[field] == value


async def test_an_output_is_not_asked_for_and_ruled_out_at_once(cluster: Cluster) -> None:
    request = infer_request("text_output", "context_logits", return_context_logits=("BOOL", False))
    message = "return_context_logits: must be true, or left out, for the output context_logits"
    assert await refusal(cluster, request) == message


async def test_the_number_of_rows_is_limited(cluster: Cluster) -> None:
    """Each row is a request, and a message has room for millions of empty rows."""
    request = infer_request("text_output")
    request.inputs[0].contents.bytes_contents[:] = [b""] * 2049
    request.inputs[0].shape[:] = [2049, 1]
    assert await refusal(cluster, request) == "text_input: has 2049 rows; must have at most 2048"


async def test_a_tensor_that_applies_to_all_rows_is_not_copied_without_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.protocols.kserve.ensemble._MAX_COPIED_BYTES", 900)
    request = infer_request("text_output", stop_words=("BYTES", b"x" * 250))
    assert (await sent(cluster, request)).stopping.stop_words == ["x" * 250]
    request.inputs[0].contents.bytes_contents[:] = [b"Hi"] * 4
    request.inputs[0].shape[:] = [4, 1]
    message = "stop_words: applies to 4 rows, and has 250 bytes; send fewer rows at a time"
    assert await refusal(cluster, request) == message


@pytest.mark.parametrize("streams", [False, True])
async def test_an_aborted_request_is_an_error_and_not_a_short_text(
    cluster: Cluster, tokenizer: Tokenizer, streams: bool
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())

    async def write() -> None:
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        (request_id,) = cluster.scheduler.requests
        cluster.scheduler.emit(request_id, tokenizer.encode(TEXT))
        cluster.scheduler.end(request_id, pb.FINISH_REASON_ABORT)

    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        writing = asyncio.create_task(write())
        if streams:
            *pieces, last = [item async for item in stub.ModelStreamInfer(iter([infer_request()]), timeout=240)]
            assert "aborted" in last.error_message
            assert not any(item.infer_response.parameters["triton_final_response"].bool_param for item in pieces)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ModelInfer(infer_request(), timeout=240)
            assert raised.value.code() is grpc.StatusCode.CANCELLED
        await writing


async def test_the_outputs_of_a_request_that_names_none_are_those_of_its_flags(cluster: Cluster) -> None:
    native = await sent(cluster, infer_request(return_context_logits=("BOOL", False)))
    assert not native.output.HasField("log_probs")
    assert not native.output.return_context_logits


async def test_a_parameter_of_another_type_is_refused(cluster: Cluster) -> None:
    request = infer_request()
    request.parameters["triton_enable_empty_final_response"].string_param = "true"
    assert await refusal(cluster, request) == "triton_enable_empty_final_response: must be a boolean"


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
async def test_a_parameter_of_a_tensor_is_refused(cluster: Cluster, kind: str) -> None:
    """Shared memory and classification would change where a tensor is, and what it contains."""
    request = infer_request("text_output")
    tensors: Any = getattr(request, kind)
    tensors[0].parameters["shared_memory_region"].string_param = "x"
    message = f"{tensors[0].name}: the parameter 'shared_memory_region' is not supported"
    assert await refusal(cluster, request) == message


async def test_two_names_of_one_parameter_have_the_same_value_or_are_refused(cluster: Cluster) -> None:
    names = {"seed": ("UINT64", 7), "random_seed": ("UINT64", 8)}
    assert (
        await refusal(cluster, infer_request(**names))
        == "random_seed: is another name for seed, which has a different value"
    )
    names = {"min_tokens": ("INT32", 3), "min_length": ("INT32", 3)}
    assert (await sent(cluster, infer_request(**names))).sampling.min_tokens == 3


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"random_seed": ("UINT64", 7), "top_p": ("FP32", 2.0)}, "top_p"),
        ({"min_length": ("INT32", 1 << 30)}, "min_length"),
        ({"end_id": ("INT32", 1 << 30)}, "end_id"),
        ({"text_input": ("BYTES", b"Hi " * 9000)}, "text_input"),
        ({"guided_decoding_guide_type": ("BYTES", b"regex")}, "guided_decoding_guide"),
        ({"guided_decoding_guide": ("BYTES", b"a+")}, "guided_decoding_guide_type"),
        ({"prompt_vocab_size": ("INT32", 3)}, "prompt_vocab_size"),
        ({"lora_task_id": ("UINT64", 7), "beam_width": ("INT32", 99)}, "beam_width"),
    ],
)
async def test_an_error_names_the_tensor_of_the_client(cluster: Cluster, inputs: Any, name: str) -> None:
    assert (await refusal(cluster, infer_request(**inputs))).startswith(f"{name}: ")


TAG = {"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a"]}


async def test_a_structural_tag_becomes_its_grammar(cluster: Cluster) -> None:
    names = {"guided_decoding_guide_type": b"structural_tag", "guided_decoding_guide": json.dumps(TAG).encode()}
    guided = await sent(cluster, infer_request(**{name: ("BYTES", text) for name, text in names.items()}))
    expected = structural_grammar(structural_body(TAG, ""), {})
    assert guided.guided_decoding == pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=expected)


async def test_an_error_names_the_part_of_a_structural_tag(cluster: Cluster) -> None:
    names = {"guided_decoding_guide_type": b"structural_tag", "guided_decoding_guide": b'{"triggers": 3}'}
    message = await refusal(cluster, infer_request(**{name: ("BYTES", text) for name, text in names.items()}))
    assert message.startswith("guided_decoding_guide.format: ")


async def test_an_error_in_a_stream_names_the_tensor_of_the_client(cluster: Cluster) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    request = infer_request("text_output", random_seed=("UINT64", 7), min_length=("INT32", 1 << 30))
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        (answer,) = [item async for item in stub.ModelStreamInfer(iter([request]), timeout=240)]
    assert answer.error_message.startswith("min_length: ")


@pytest.mark.parametrize(
    ("field", "given", "name"),
    [
        ("sampling.seed", {"random_seed"}, "random_seed"),
        ("sampling", {"presence_penalty"}, "presence_penalty"),
        ("output.log_probs", {"output_log_probs"}, "output_log_probs"),
        ("output", {"return_generation_logits"}, "return_generation_logits"),
        ("stopping.stop_words", set(), "stop_words"),
        ("lora.name", {"lora_task_id"}, "lora_task_id"),
        ("prompt_tuning.table.shape", set(), "prompt_embedding_table"),
        ("sampling.top_p_decay", set(), "sampling.top_p_decay"),
        ("raw_input_contents", set(), "raw_input_contents"),
    ],
)
def test_native_fields_have_their_tensors(field: str, given: set[str], name: str) -> None:
    assert tensor_of(field, given) == name


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_stream_ends_with_a_status_when_the_router_drains(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    """Running requests end first; later ones get no response, so that the client knows that they were not run."""
    monkeypatch.setattr(servicer, "_LAST_REQUEST_S", 0.0)
    router = await cluster.add_router(await cluster.add_detokenizer())
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        call = stub.ModelStreamInfer(timeout=240)
        await call.write(infer_request())
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        (request_id,) = cluster.scheduler.requests
        answers: list[Any] = []
        if not is_busy:
            cluster.scheduler.end(request_id)
            answers.append(await call.read())
        draining = asyncio.create_task(router.server.stop(drain_timeout_s=60))
        if is_busy:
            await router.server.draining.wait()
            await call.write(infer_request())
            cluster.scheduler.end(request_id)
            answers.append(await call.read())
        assert [answer.error_message for answer in answers] == [""]
        assert answers[0].infer_response.parameters["triton_final_response"].bool_param
        with pytest.raises(grpc.aio.AioRpcError, match="draining") as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(draining, 240)
    assert len(cluster.scheduler.requests) == 1


async def test_a_call_that_arrives_as_the_router_drains_is_served(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_LAST_REQUEST_S", 60.0)
    router = await cluster.add_router(await cluster.add_detokenizer())
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        await stub.ServerLive(kserve_pb2.ServerLiveRequest(), timeout=240)
        call = stub.ModelStreamInfer(timeout=240)
        draining = asyncio.create_task(router.server.stop(drain_timeout_s=60))
        await router.server.draining.wait()
        await call.write(infer_request())
        await call.done_writing()
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        cluster.scheduler.end(next(iter(cluster.scheduler.requests)))
        answer: Any = await call.read()
        assert not answer.error_message
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(draining, 240)
