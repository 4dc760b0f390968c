"""Request each feature natively and through each API, with the client of that API."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import openai

from midstream import executor as api
from midstream.client import AsyncClient
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import kserve_pb2
from protos import openengine_pb2 as oe
from tests.integration.api_clients import ApiClients, texts_of
from tests.router.adapters.sse import post_stream

PROMPT = "One two three four. One two"
MESSAGES: list[Any] = [{"role": "user", "content": "Count to five."}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
TABLE = np.random.default_rng(5).normal(0, 1, (2, 576)).astype(np.float32)
LORA = "1"
MAX_TOKENS = 6
# Guided answers end earlier, with the grammar. A stream must be long enough to arrive as several events even on a
# loaded machine.
LONGER = {"guided": 60, "tools": 60, "streaming": 64}


@dataclass
class Answer:
    """The relevant parts of an API's response.

    Attributes:
        texts: The text of each sequence.
        beside: Names of additional outputs.
    """

    texts: list[str] = field(default_factory=list)
    beside: set[str] = field(default_factory=set)


class RefusedError(Exception):
    """The API rejected the request; the message of this exception is the status."""


def num_tokens(feature: str) -> int:
    """Return the `max_tokens` of requests that use the feature."""
    return LONGER.get(feature, MAX_TOKENS)


def native_fields(feature: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of the native request that use a feature."""
    blue, two = (tokenizer.encode(text) for text in (" blue", " three"))
    digits = tokenizer.encode("1234567890")
    table = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=TABLE.shape, data=TABLE.tobytes())
    retention = pb.KvRetentionConfig(token_ranges=[pb.KvRetentionConfig.TokenRange(start=0, priority=90)])
    drafts = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=3)
    topk = pb.AdditionalOutput(name="topk_logits.3")
    guide = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps(SCHEMA))
    found: dict[str, dict[str, Any]] = {
        "seeded": {
            "sampling": pb.SamplingConfig(temperature=1.5, seed=11, top_k=40, top_p=0.875, min_p=0.0),
        },
        "sequences": {"sampling": pb.SamplingConfig(temperature=1.5, seed=11, num_return_sequences=2)},
        "beams": {"sampling": pb.SamplingConfig(temperature=1, beam_width=2, num_return_sequences=2, length_penalty=1)},
        "penalties": {
            "sampling": pb.SamplingConfig(
                temperature=0, repetition_penalty=1.5, presence_penalty=1.5, frequency_penalty=1.5
            )
        },
        # As in the executor, where the model's own defaults do not apply.
        "sequences of the executor": {
            "sampling": pb.SamplingConfig(
                temperature=1.5,
                seed=11,
                num_return_sequences=2,
                top_k=0,
                top_p=1,
                min_p=0,
                repetition_penalty=1,
                no_repeat_ngram_size=0,
                min_tokens=1,
            )
        },
        "penalties of the executor": {
            "sampling": pb.SamplingConfig(
                temperature=0, repetition_penalty=1.5, presence_penalty=1.5, frequency_penalty=1.5, penalize_prompt=True
            )
        },
        "bias": {"sampling": pb.SamplingConfig(temperature=0, embedding_bias=dict.fromkeys(blue, 50))},
        "allowed_tokens": {"sampling": pb.SamplingConfig(temperature=0, allowed_token_ids=digits)},
        "bad_words": {"stopping": pb.StoppingConfig(bad_words=[" three", ","])},
        "ngrams": {"sampling": pb.SamplingConfig(temperature=0, no_repeat_ngram_size=1)},
        "top_p_decay": {"sampling": pb.SamplingConfig(temperature=1.5, seed=3, top_p=0.9, top_p_decay=0.5)},
        "stop_words": {"stopping": pb.StoppingConfig(stop_words=[" four", " 2"])},
        "stop_tokens": {
            "stopping": pb.StoppingConfig(stop_token_ids=two),
            "sampling": pb.SamplingConfig(temperature=0, min_tokens=2),
        },
        "log_probs": {"output": pb.OutputConfig(log_probs=2)},
        "prompt_log_probs": {"output": pb.OutputConfig(prompt_log_probs=0)},
        "context_logits": {"output": pb.OutputConfig(return_context_logits=True)},
        "generation_logits": {"output": pb.OutputConfig(return_generation_logits=True)},
        "additional_outputs": {"output": pb.OutputConfig(additional_outputs=[topk])},
        "guided": {"guided_decoding": guide},
        "post_processor": {"logits_post_processor_name": "count_up", "client_id": "abc"},
        "lora": {"lora": pb.LoraConfig(name=LORA)},
        "prompt_tuning": {"prompt_tuning": pb.PromptTuningConfig(table=table)},
        "prompt_embeddings": {"prompt_embeddings": table},
        "drafts": {"speculative": drafts},
        "retention": {"kv_retention": retention},
        "priority": {"priority": 7},
        "cache_salt": {"cache_salt": "mine"},
        "streaming": {"streaming": True},
    }
    return found.get(feature, {})


class Asking:
    """Clients for all APIs of one router; each `ask` returns an Answer or raises RefusedError."""

    def __init__(
        self,
        clients: ApiClients,
        executor: api.GenerationExecutor,
        tokenizer: Tokenizer,
        address: str,
        expected: dict[tuple[str, bool], Answer],
    ) -> None:
        """Create the clients. `expected` caches the answers of the native call; its keys are (feature, whether the
        input is a chat).
        """
        self._clients = clients
        self._executor = executor
        self._tokenizer = tokenizer
        self._address = address
        self._expected = expected

    def ask(self, api_name: str, feature: str) -> Awaitable[Answer]:
        """Request the feature through the API."""
        ways: dict[str, Callable[[str], Awaitable[Answer]]] = {
            "native": self.native,
            "executor": self._ask_executor,
            "completions": self._complete,
            "chat": self._chat,
            "kserve": self._infer,
            "openengine": self._generate,
        }
        return ways[api_name](feature)

    async def native(self, feature: str, *, chat: bool = False) -> Answer:
        """Return the answer of the native call."""
        if feature == "chat":
            chat = True
        if (feature, chat) not in self._expected:
            self._expected[feature, chat] = await self._ask_native(feature, chat=chat)
        return self._expected[feature, chat]

    async def _ask_native(self, feature: str, *, chat: bool) -> Answer:
        request = pb.GenerateRequest(max_tokens=num_tokens(feature))
        request.sampling.temperature = 0
        fields = native_fields(feature, self._tokenizer)
        if chat:
            request.chat.messages.add(role="user", content=MESSAGES[0]["content"])
        elif feature != "prompt_embeddings":
            request.prompt = PROMPT
        request.MergeFrom(pb.GenerateRequest(**fields))
        async with AsyncClient(self._address) as client:
            result = await client.stream(request, timeout_s=60).result()
        answer = Answer([sequence.text for sequence in result.sequences])
        first = result.sequences[0]
        if first.extras is not None:
            answer.beside |= {"log_probs"} if first.extras.log_probs else set()
            answer.beside |= {"prompt_log_probs"} if first.extras.prompt_log_probs else set()
            answer.beside |= first.tensors.keys()
        return answer

    async def _ask_executor(self, feature: str) -> Answer:
        params, fields = _executor_arguments(feature, self._tokenizer)
        sampling = api.SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens(feature)} | params)
        prompt = None if feature == "prompt_embeddings" else PROMPT
        result = self._executor.generate_async(prompt, sampling, **fields)
        await result.aresult(timeout=240)
        answer = Answer([output.text for output in result.outputs])
        output = result.outputs[0]
        answer.beside = {
            name
            for name, value in {
                "log_probs": output.logprobs,
                "prompt_log_probs": result.prompt_logprobs,
                "context_logits": result.context_logits,
                "generation_logits": output.generation_logits,
            }.items()
            if value is not None and len(value)
        } | output.additional_generation_outputs.keys()
        return answer

    async def _complete(self, feature: str) -> Answer:
        fields = self._openai_fields(feature)
        if feature == "log_probs":
            fields["logprobs"] = 2
        body = {
            "model": "smollm2",
            "max_tokens": num_tokens(feature),
            "temperature": 0.0,
        } | fields
        return await self._openai("/completions", {"prompt": PROMPT} | body)

    async def _chat(self, feature: str) -> Answer:
        fields = self._openai_fields(feature)
        if feature == "log_probs":
            fields |= {"logprobs": True, "top_logprobs": 2}
        if feature == "tools":
            fields |= {"tools": [TOOL], "tool_choice": "required"}
        body = {"model": "smollm2", "max_tokens": num_tokens(feature), "temperature": 0.0} | fields
        return await self._openai("/chat/completions", {"messages": MESSAGES} | body)

    def _openai_fields(self, feature: str) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {
            "seeded": {"temperature": 1.5, "seed": 11, "top_k": 40, "top_p": 0.875, "min_p": 0.0},
            "sequences": {"temperature": 1.5, "seed": 11, "n": 2},
            "beams": {"temperature": 1.0, "use_beam_search": True, "n": 2},
            "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.5, "frequency_penalty": 1.5},
            "bias": {"logit_bias": {str(token): 50 for token in self._tokenizer.encode(" blue")}},
            "allowed_tokens": {"allowed_token_ids": self._tokenizer.encode("1234567890")},
            "bad_words": {"bad_words": [" three", ","]},
            "stop_words": {"stop": [" four", " 2"]},
            "stop_tokens": {"stop_token_ids": self._tokenizer.encode(" three"), "min_tokens": 2},
            "prompt_log_probs": {"prompt_logprobs": 1},
            "guided": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "post_processor": {"logits_processors": ["count_up"]},
            "lora": {"model": LORA},
            "prompt_embeddings": {"prompt_embeds": "AAAA"},
            "priority": {"priority": -7},
            "cache_salt": {"cache_salt": "mine"},
            "streaming": {"stream": True},
        }
        return dict(found.get(feature, {}))

    async def _openai(self, path: str, body: dict[str, Any]) -> Answer:
        if body.get("stream"):
            return await self._openai_stream(path, body)
        client = self._clients.openai
        model = body.pop("model")
        try:
            if path == "/completions":
                prompt = body.pop("prompt")
                reply = await client.completions.with_raw_response.create(model=model, prompt=prompt, extra_body=body)
            else:
                turns = body.pop("messages")
                reply = await client.chat.completions.with_raw_response.create(
                    model=model, messages=turns, extra_body=body
                )
        except openai.APIStatusError as error:
            raise RefusedError("UNIMPLEMENTED" if error.code == "unsupported" else "INVALID_ARGUMENT") from None
        answer, body = Answer(), json.loads(reply.text)
        answer.beside |= {"prompt_log_probs"} if body.get("prompt_logprobs") else set()
        for choice in body["choices"]:
            message = choice.get("message")
            answer.texts.append(choice["text"] if message is None else message["content"] or "")
            answer.beside |= {"log_probs"} if choice["logprobs"] else set()
            answer.beside |= {"prompt_log_probs"} if choice.get("prompt_logprobs") else set()
            answer.beside |= {"tool_calls"} if message and message.get("tool_calls") else set()
        return answer

    async def _openai_stream(self, path: str, body: dict[str, Any]) -> Answer:
        text, num_events = "", 0
        async with post_stream(self._clients.http_port, f"/v1{path}", body) as stream:
            async for event in stream.events():
                (choice,) = event["choices"]
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                num_events += 1
        assert num_events > 1
        return Answer([text])

    async def _infer(self, feature: str) -> Answer:
        request = kserve_pb2.ModelInferRequest(model_name="ensemble")
        tensors: dict[str, tuple[str, list[Any]]] = {}
        tensors |= {
            "text_input": ("BYTES", [PROMPT.encode()]),
            "max_tokens": ("INT32", [num_tokens(feature)]),
            "temperature": ("FP32", [0.0]),
        }
        tensors |= _infer_fields(feature)
        for name, (datatype, values) in tensors.items():
            item = request.inputs.add(name=name, datatype=datatype, shape=(1, len(values)))
            getattr(item.contents, _CONTENTS[datatype]).extend(values)
        if feature == "prompt_tuning":
            item = request.inputs.add(name="prompt_embedding_table", datatype="FP32", shape=(1, *TABLE.shape))
            item.contents.fp32_contents.extend(TABLE.ravel().tolist())
        try:
            if feature == "streaming":
                return await self._infer_stream(request)
            response = await self._clients.kserve.ModelInfer(request, timeout=240)
        except grpc.aio.AioRpcError as error:
            raise RefusedError(error.code().name) from None
        outputs = dict(zip((item.name for item in response.outputs), response.raw_output_contents, strict=True))
        shapes = {item.name: list(item.shape) for item in response.outputs}
        answer = Answer(texts_of(outputs["text_output"]))
        for name in ("context_logits", "generation_logits"):
            if name in shapes and np.prod(shapes[name]) > 1:
                answer.beside.add(name)
        if len(outputs.get("output_log_probs", b"")) and np.frombuffer(outputs["output_log_probs"], np.float32).any():
            answer.beside.add("log_probs")
        return answer

    async def _infer_stream(self, request: kserve_pb2.ModelInferRequest) -> Answer:
        found: defaultdict[int, str] = defaultdict(str)
        num_answers = 0
        async for part in self._clients.kserve.ModelStreamInfer(iter([request]), timeout=240):
            assert not part.error_message
            names = (item.name for item in part.infer_response.outputs)
            outputs = dict(zip(names, part.infer_response.raw_output_contents, strict=True))
            (index,) = struct.unpack("<i", outputs["sequence_index"])
            found[index] += "".join(texts_of(outputs["text_output"]))
            num_answers += 1
        assert num_answers > 1
        return Answer([found[index] for index in sorted(found)])

    async def _generate(self, feature: str) -> Answer:
        request = oe.GenerateRequest(
            prompt=PROMPT,
            sampling=oe.SamplingParams(temperature=0),
            stopping=oe.StoppingOptions(max_tokens=num_tokens(feature)),
        )
        request.MergeFrom(oe.GenerateRequest(**_openengine_fields(feature, self._tokenizer)))
        metadata = [("openengine-priority", "7")] if feature == "priority" else []
        found: defaultdict[int, str] = defaultdict(str)
        answer, num_events = Answer(), 0
        async for event in self._clients.openengine.Generate(request, timeout=240, metadata=metadata):
            assert not event.HasField("error"), event.error
            if event.HasField("token"):
                found[event.token.output_index] += event.token.text
                num_events += 1
                if any(info.HasField("logprob") for info in event.token.tokens):
                    answer.beside.add("log_probs")
            elif event.HasField("prompt"):
                answer.beside.add("prompt_log_probs")
        assert feature != "streaming" or num_events > 1
        answer.texts = [found[index] for index in sorted(found)]
        return answer


def _executor_arguments(feature: str, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampling parameters and the other arguments."""
    params: dict[str, dict[str, Any]] = {
        "seeded": {"temperature": 1.5, "seed": 11, "top_k": 40, "top_p": 0.875, "min_p": 0.0},
        "sequences": {"temperature": 1.5, "top_p": 1.0, "seed": 11, "n": 2},
        "beams": {"temperature": 1.0, "use_beam_search": True, "n": 2, "length_penalty": 1.0},
        "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.5, "frequency_penalty": 1.5},
        "bias": {"embedding_bias": dict.fromkeys(tokenizer.encode(" blue"), 50.0)},
        "bad_words": {"bad": [" three", ","]},
        "ngrams": {"no_repeat_ngram_size": 1},
        "top_p_decay": {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_p_decay": 0.5},
        "stop_words": {"stop": [" four", " 2"]},
        "stop_tokens": {"stop_token_ids": tokenizer.encode(" three"), "min_tokens": 2},
        "log_probs": {"logprobs": 2},
        "prompt_log_probs": {"prompt_logprobs": 0},
        "context_logits": {"return_context_logits": True},
        "generation_logits": {"return_generation_logits": True},
        "additional_outputs": {"additional_model_outputs": ["topk_logits.3"]},
        "guided": {"guided_decoding": api.GuidedDecodingParams(json=SCHEMA)},
        "post_processor": {"logits_processor": "count_up"},
    }
    keeps = api.KvCacheRetentionConfig([api.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 90)])
    fields: dict[str, dict[str, Any]] = {
        "post_processor": {"client_id": "abc"},
        "lora": {"lora_request": api.LoRARequest(LORA)},
        "prompt_tuning": {"prompt_tuning_table": TABLE},
        "prompt_embeddings": {"prompt_embeddings": TABLE},
        "drafts": {"speculative_config": api.NGramDecodingConfig(3)},
        "retention": {"kv_cache_retention_config": keeps},
        "priority": {"priority": 0.6},
        "cache_salt": {"cache_salt": "mine"},
        "streaming": {"streaming": True},
    }
    return params.get(feature, {}), fields.get(feature, {})


def _infer_fields(feature: str) -> dict[str, tuple[str, list[Any]]]:
    found: dict[str, dict[str, tuple[str, list[Any]]]] = {
        "seeded": {"temperature": ("FP32", [1.5]), "seed": ("UINT64", [11]), "top_k": ("INT32", [40]),
                   "top_p": ("FP32", [0.875])},
        "sequences": {"temperature": ("FP32", [1.5]), "seed": ("UINT64", [11]), "num_return_sequences": ("INT32", [2])},
        "beams": {"temperature": ("FP32", [1.0]), "beam_width": ("INT32", [2]), "length_penalty": ("FP32", [1.0])},
        "penalties": {name: ("FP32", [1.5]) for name in
                      ("repetition_penalty", "presence_penalty", "frequency_penalty")},
        "bias": {"embedding_bias_words": ("BYTES", [b" blue"]), "embedding_bias_weights": ("FP32", [50.0])},
        "bad_words": {"bad_words": ("BYTES", [b" three", b","])},
        "stop_words": {"stop_words": ("BYTES", [b" four", b" 2"])},
        "log_probs": {"return_log_probs": ("BOOL", [True])},
        "context_logits": {"return_context_logits": ("BOOL", [True])},
        "generation_logits": {"return_generation_logits": ("BOOL", [True])},
        "guided": {"guided_decoding_guide_type": ("BYTES", [b"json_schema"]),
                   "guided_decoding_guide": ("BYTES", [json.dumps(SCHEMA).encode()])},
        "lora": {"lora_task_id": ("UINT64", [int(LORA)])},
        "streaming": {"stream": ("BOOL", [True])},
    }  # fmt: skip
    return found.get(feature, {})


def _openengine_fields(feature: str, tokenizer: Tokenizer) -> dict[str, Any]:
    words = [oe.StopCondition(stop_text=word) for word in (" four", " 2")]
    tokens = [oe.StopCondition(stop_token_id=token) for token in tokenizer.encode(" three")]
    penalties = oe.SamplingParams(repetition_penalty=1.5, presence_penalty=1.5, frequency_penalty=1.5)
    top = oe.CandidateTokenSelection(top_n=2)
    found: dict[str, dict[str, Any]] = {
        "seeded": {"sampling": oe.SamplingParams(temperature=1.5, seed=11, top_k=40, top_p=0.875)},
        "sequences": {"sampling": oe.SamplingParams(temperature=1.5, seed=11, num_sequences=2)},
        "penalties": {"sampling": penalties},
        "stop_words": {"stopping": oe.StoppingOptions(conditions=words)},
        "stop_tokens": {"stopping": oe.StoppingOptions(conditions=tokens, min_tokens=2)},
        "log_probs": {"response": oe.ResponseOptions(return_output_logprobs=True, output_candidates=top)},
        "prompt_log_probs": {"response": oe.ResponseOptions(return_prompt_logprobs=True)},
        "guided": {"guided": oe.GuidedDecoding(json_schema=json.dumps(SCHEMA))},
        "lora": {"lora_name": LORA},
        "cache_salt": {"kv": oe.KvOptions(cache_salt="mine")},
    }
    return found.get(feature, {})


_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
}
