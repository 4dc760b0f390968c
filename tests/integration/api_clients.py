"""Send one request through each API with that API's own client."""

from __future__ import annotations

import random
import ssl
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import openai

from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import kserve_pb2, kserve_pb2_grpc, openengine_pb2_grpc, service_pb2_grpc
from protos import openengine_pb2 as oe

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub
    from protos.openengine_pb2_grpc import InferenceAsyncStub
    from protos.service_pb2_grpc import MidstreamAsyncStub

# An empty TLS context for clients of http:// addresses; by default, each client would load the system's certificates,
# which takes 50 ms.
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_WORDS = ("The", "river", "of", "a", "small", "town", "sings", "日本", "and", "1 + 1 =", "Paris", "why")
_FLOATS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def plain_http() -> openai.DefaultAsyncHttpxClient:
    """Return an HTTP client for OpenAI's client that cannot use https:// addresses."""
    return openai.DefaultAsyncHttpxClient(verify=_NO_CERTIFICATES)


@dataclass(frozen=True)
class Case:
    """A request whose numeric values are exact in float32."""

    prompt: str
    max_tokens: int
    num_sequences: int
    seed: int
    top_k: int
    min_tokens: int
    temperature: float
    top_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: tuple[str, ...]

    @classmethod
    def draw(cls, rng: random.Random) -> Case:
        return cls(
            prompt=" ".join(rng.choices(_WORDS, k=rng.randint(1, 24))),
            max_tokens=rng.randint(1, 14),
            num_sequences=rng.choice((1, 1, 2, 3)),
            seed=rng.getrandbits(63),
            top_k=rng.choice((0, 1, 5, 200)),
            min_tokens=rng.choice((0, 0, 3)),
            temperature=rng.choice((0.0, 0.5, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.875, 0.5)),
            repetition_penalty=rng.choice((1.0, 1.25)),
            presence_penalty=rng.choice((0.0, -0.5, 1.5)),
            frequency_penalty=rng.choice((0.0, 0.75)),
            stop=rng.choice(((), (), (" the", "\n"))),
        )

    def fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


@dataclass
class Sequence:
    """The output of one sequence; `token_ids` is empty if the API does not return token ids."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = ""


class ApiClients:
    """Clients for all APIs of one router."""

    def __init__(self, grpc_address: str, http_address: str) -> None:
        self.channel = open_channel(grpc_address)
        self.native = cast("MidstreamAsyncStub", service_pb2_grpc.MidstreamStub(self.channel))
        self.kserve = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(self.channel))
        self.openengine = cast("InferenceAsyncStub", openengine_pb2_grpc.InferenceStub(self.channel))
        self.http_port = int(http_address.rpartition(":")[2])
        self.openai = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.http_port}/v1", api_key="-", max_retries=0, http_client=plain_http()
        )

    async def close(self) -> None:
        await self.openai.close()
        await self.channel.close()

    async def ask_native(self, case: Case) -> list[Sequence]:
        sampling = pb.SamplingConfig(
            num_return_sequences=case.num_sequences, **case.fields("seed", "top_k", "min_tokens", *_FLOATS)
        )
        request = pb.GenerateRequest(
            prompt=case.prompt,
            max_tokens=case.max_tokens,
            sampling=sampling,
            stopping=pb.StoppingConfig(stop_words=case.stop),
            output=pb.OutputConfig(log_probs=0),
        )
        found: defaultdict[int, Sequence] = defaultdict(Sequence)
        async for chunk in self.native.Generate(request, timeout=240):
            sequence = found[chunk.sequence_index]
            sequence.text += chunk.text
            sequence.token_ids += chunk.token_ids
            sequence.log_probs += chunk.log_probs.token_log_probs
            if chunk.is_sequence_final:
                sequence.reason = pb.FinishReason.Name(chunk.finish_reason).removeprefix("FINISH_REASON_").lower()
        return _in_order(found)

    async def ask_openai(self, case: Case) -> list[Sequence]:
        completion = await self.openai.completions.create(**_completion(case), stream=False)
        found: defaultdict[int, Sequence] = defaultdict(Sequence)
        for choice in completion.choices:
            _add_choice(found[choice.index], choice)
        return _in_order(found)

    async def ask_openai_stream(self, case: Case) -> list[Sequence]:
        found: defaultdict[int, Sequence] = defaultdict(Sequence)
        async for event in await self.openai.completions.create(**_completion(case), stream=True):
            for choice in event.choices:
                _add_choice(found[choice.index], choice)
        return _in_order(found)

    async def ask_kserve(self, case: Case) -> list[Sequence]:
        response = await self.kserve.ModelInfer(infer_request(case), timeout=240)
        outputs = dict(zip((item.name for item in response.outputs), response.raw_output_contents, strict=True))
        shape = next(list(item.shape) for item in response.outputs if item.name == "output_log_probs")
        rows = struct.unpack(f"<{shape[0] * shape[1]}f", outputs["output_log_probs"])
        sequences = [Sequence(text) for text in texts_of(outputs["text_output"])]
        for index, sequence in enumerate(sequences):
            # Rows are padded with zeros to the same length.
            sequence.log_probs = list(rows[index * shape[1] :][: shape[1]])
        return sequences

    async def ask_kserve_stream(self, case: Case) -> list[Sequence]:
        call = self.kserve.ModelStreamInfer(iter([infer_request(case, stream=True)]), timeout=240)
        found: defaultdict[int, Sequence] = defaultdict(Sequence)
        async for answer in call:
            assert not answer.error_message
            names = (item.name for item in answer.infer_response.outputs)
            outputs = dict(zip(names, answer.infer_response.raw_output_contents, strict=True))
            (index,) = struct.unpack("<i", outputs["sequence_index"])
            found[index].text += "".join(texts_of(outputs["text_output"]))
            data = outputs.get("output_log_probs", b"")
            found[index].log_probs += struct.unpack(f"<{len(data) // 4}f", data)
        return _in_order(found)

    async def ask_openengine(self, case: Case) -> list[Sequence]:
        conditions = [oe.StopCondition(stop_text=word) for word in case.stop]
        request = oe.GenerateRequest(
            prompt=case.prompt,
            sampling=oe.SamplingParams(num_sequences=case.num_sequences, **case.fields("seed", "top_k", *_FLOATS)),
            stopping=oe.StoppingOptions(max_tokens=case.max_tokens, min_tokens=case.min_tokens, conditions=conditions),
            response=oe.ResponseOptions(return_output_logprobs=True),
        )
        found: defaultdict[int, Sequence] = defaultdict(Sequence)
        async for event in self.openengine.Generate(request, timeout=240):
            if event.HasField("token"):
                sequence = found[event.token.output_index]
                sequence.text += event.token.text
                sequence.token_ids += [info.token_id for info in event.token.tokens]
                sequence.log_probs += [info.logprob for info in event.token.tokens]
            elif event.HasField("finished"):
                name = oe.FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_").lower()
                found[event.finished.output_index].reason = name
        return _in_order(found)


def infer_request(case: Case, *, stream: bool = False) -> kserve_pb2.ModelInferRequest:
    """Return the case as the tensors of TensorRT-LLM's ensemble model."""
    request = kserve_pb2.ModelInferRequest(model_name="ensemble")

    def add(name: str, datatype: str, *values: object) -> None:
        item = request.inputs.add(name=name, datatype=datatype, shape=(1, len(values)))
        getattr(item.contents, _CONTENTS[datatype]).extend(values)

    add("text_input", "BYTES", case.prompt.encode())
    add("max_tokens", "INT32", case.max_tokens)
    add("num_return_sequences", "INT32", case.num_sequences)
    add("seed", "UINT64", case.seed)
    add("top_k", "INT32", case.top_k)
    add("min_tokens", "INT32", case.min_tokens)
    add("return_log_probs", "BOOL", True)
    add("stream", "BOOL", stream)
    for name in _FLOATS:
        add(name, "FP32", getattr(case, name))
    if case.stop:
        add("stop_words", "BYTES", *(word.encode() for word in case.stop))
    return request


_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
}


def _completion(case: Case) -> dict[str, Any]:
    extras = {"return_token_ids": True, **case.fields("top_k", "min_tokens", "repetition_penalty")}
    fields = case.fields("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens", "seed")
    return {
        "model": "smollm2", "prompt": case.prompt, "n": case.num_sequences, "logprobs": 0, "stop": list(case.stop),
        "extra_body": extras, **fields,
    }  # fmt: skip


def _add_choice(sequence: Sequence, choice: openai.types.CompletionChoice) -> None:
    sequence.text += choice.text
    sequence.token_ids += cast("list[int]", (choice.model_extra or {})["token_ids"])
    if choice.logprobs is not None:
        sequence.log_probs += [value or 0.0 for value in choice.logprobs.token_logprobs or ()]
    sequence.reason = choice.finish_reason or ""


def _in_order(found: dict[int, Sequence]) -> list[Sequence]:
    return [found[index] for index in sorted(found)]


def texts_of(data: bytes) -> list[str]:
    texts, position = list[str](), 0
    while position < len(data):
        (size,) = struct.unpack_from("<I", data, position)
        texts.append(data[position + 4 :][:size].decode())
        position += 4 + size
    return texts
