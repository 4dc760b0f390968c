"""OpenAI's official client, with a router on a real socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import httpx2 as httpx
import openai
import pytest

from midstream.errors import (
    AlreadyExistsError,
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OverloadedError,
    UnsupportedError,
)
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import loads_pb2
from router.protocols.conversation import ChatModel
from tests.router.adapters.clients import client_of
from tests.router.adapters.sse import post_stream
from tests.router.conftest import Cluster, Part
from tests.router.parsers.transcripts import model_format

TEXT = "Every part may die 🫠 and the text goes on: 日本語, naïve, done."


async def answer(
    cluster: Cluster,
    request_id: str,
    ids: list[int],
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH,
) -> None:
    await cluster.scheduler.until(lambda: request_id in cluster.scheduler.requests)
    cluster.scheduler.emit(request_id, ids)
    cluster.scheduler.end(request_id, reason)


async def test_a_completion_is_the_text_of_its_tokens(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with client_of(router) as client:
        extra = {"request_id": "r", "priority": 3, "ignore_eos": True}
        call = client.completions.create(model="smollm2", prompt=[5, 6], max_tokens=99, extra_body=extra)
        completion, _ = await asyncio.gather(call, answer(cluster, "r", ids))
    assert completion.choices[0].text == TEXT
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, len(ids))
    native = cluster.scheduler.requests["r"].request
    assert (list(native.token_ids.values), native.max_tokens, native.priority) == ([5, 6], 99, -3)
    assert native.stopping.ignore_eos


async def test_a_chat_streams_and_ends_with_usage(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    async with client_of(router) as client:
        stream = await asyncio.wait_for(
            client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": "Hi"}], stream=True,
                stream_options={"include_usage": True}, extra_body={"request_id": "r"},
            ), 60,
        )  # fmt: skip
        await answer(cluster, "r", tokenizer.encode(TEXT))
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(TEXT))


@pytest.mark.parametrize(("reason", "status"), [(pb.FINISH_REASON_ABORT, 499), (pb.FINISH_REASON_DEADLINE, 504)])
async def test_a_text_that_was_cut_off_ends_with_an_error_and_without_a_finish_reason(
    cluster: Cluster, router: Part, tokenizer: Tokenizer, reason: pb.FinishReason.ValueType, status: int
) -> None:
    """Strict clients know no finish reason for aborted output."""
    async with client_of(router) as client:
        hi: Any = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}
        call = client.chat.completions.create(**hi, extra_body={"request_id": "r"})
        with pytest.raises(openai.APIStatusError) as raised:
            await asyncio.gather(call, answer(cluster, "r", tokenizer.encode(TEXT), reason))
        assert raised.value.status_code == status
        stream = await client.chat.completions.create(**hi, stream=True, extra_body={"request_id": "s"})
        await answer(cluster, "s", tokenizer.encode(TEXT), reason)
        choices: list[Any] = []
        with pytest.raises(openai.APIError):  # noqa: PT012 (the chunks before the error count)
            async for chunk in stream:
                choices += chunk.choices
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert {choice.finish_reason for choice in choices} == {None}


async def test_several_prompts_are_read_at_once_and_end_with_the_first_that_fails(
    cluster: Cluster, router: Part, tokenizer: Tokenizer
) -> None:
    """If the prompts were read one after another, the scheduler would abort a request that has had no reader for 30
    seconds while an earlier one was read.
    """
    names = ["r-0", "r-1", "r-2"]
    async with client_of(router) as client:
        body: Any = {"model": "smollm2", "prompt": ["a", "b", "c"], "extra_body": {"request_id": "r"}}
        call = asyncio.create_task(client.completions.create(**body))
        feeds = cluster.scheduler.feeds
        await cluster.scheduler.until(lambda: [sorted(feed.attached.values()) for feed in feeds] == [names])
        cluster.scheduler.end("r-1", pb.FINISH_REASON_ERROR, error=ExecutionError("lost").to_proto())
        with pytest.raises(openai.InternalServerError, match="lost"):
            await call
        await cluster.scheduler.until(lambda: sorted(cluster.scheduler.aborts) == ["r-0", "r-2"])
        cluster.scheduler.requests.clear()
        call = asyncio.create_task(client.completions.create(**body))
        for name in reversed(names):
            await answer(cluster, name, tokenizer.encode(f"text of {name}"))
        assert [choice.text for choice in (await call).choices] == [f"text of {name}" for name in names]


async def test_a_disconnect_aborts_the_request(cluster: Cluster, router: Part) -> None:
    async with client_of(router) as client:
        stream = await client.completions.create(
            model="smollm2", prompt="Hi", stream=True, extra_body={"request_id": "r"}
        )
        await stream.close()
        await cluster.scheduler.until(lambda: cluster.scheduler.aborts == ["r"])


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = '[{"name": "weather", "parameters": {"city": "東京"}}, {"name": "weather", "parameters": {"city": "Oslo"}}]'


async def test_another_router_takes_a_stream_up_when_one_is_killed(
    cluster: Cluster, router: Part, tokenizer: Tokenizer
) -> None:
    """No output is lost or duplicated, even with several sequences or with tool calls in the text."""
    second = await cluster.add_router(await cluster.add_detokenizer("e"))
    assert router.http is not None
    assert second.http is not None
    prompt: dict[str, object] = {"prompt": "Hi", "n": 2, "stream": True, "request_id": "two"}
    message = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "request_id": "call"}
    chat: dict[str, object] = {**message, "tools": [WEATHER], "tool_choice": "required"}
    # The ids of tokens are sent even while the parser holds back their text.
    chat["return_token_ids"] = True
    for path, body, text in (("/v1/completions", prompt, TEXT), ("/v1/chat/completions", chat, CALLS)):
        name, ids = str(body["request_id"]), tokenizer.encode(text)
        async with post_stream(router.http.port, path, body) as stream:
            await cluster.scheduler.until(lambda name=name: name in cluster.scheduler.requests)
            events = []
            for token in ids[: len(ids) // 2]:
                cluster.scheduler.emit(name, [token])
                events.append(await anext(stream.events()))
            last_id = stream.last_id
            if path == "/v1/chat/completions":
                await router.kill()
        for index in range(int(str(body.get("n", 1)))):
            cluster.scheduler.emit(name, ids[len(ids) // 2 :] if index == 0 else ids, index)
        cluster.scheduler.end(name, reason=pb.FINISH_REASON_STOP, sequences=range(int(str(body.get("n", 1)))))
        async with post_stream(second.http.port, path, body, last_id) as stream:
            events += [event async for event in stream.events()]
        choices = [choice for event in events for choice in event["choices"]]
        if path == "/v1/completions":
            for index in range(2):
                assert "".join(choice["text"] for choice in choices if choice["index"] == index) == TEXT
        else:
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
            assert [(call["index"], json.loads(call["function"]["arguments"])) for call in calls] == [
                (0, {"city": "東京"}),
                (1, {"city": "Oslo"}),
            ]
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
            assert not "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("reads_text", [False, True])
async def test_an_event_id_beyond_the_end_ends_the_stream_with_an_error(
    cluster: Cluster, router: Part, tokenizer: Tokenizer, reads_text: bool
) -> None:
    assert router.http is not None
    body: dict[str, object] = {"prompt": "Hi", "stream": True, "request_id": "r"}
    path, ids = "/v1/completions", tokenizer.encode("Hi there")
    if reads_text:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
        body |= {"stream": True, "request_id": "r"}
    async with post_stream(router.http.port, path, body) as stream:
        await answer(cluster, "r", ids)
        _ = [event async for event in stream.events()]
        assert stream.last_id.startswith(f"r/{len(ids)}")
    for beyond in ("r/9", "r/9:99f", "r/9f") if reads_text else ("r/9", "r/9f"):
        async with post_stream(router.http.port, path, body, beyond) as stream:
            *_, last = [event async for event in stream.events()]
        assert (last["error"]["param"], last["error"]["type"]) == ("Last-Event-ID", "invalid_request_error")


async def test_an_event_id_of_another_request_is_refused(router: Part) -> None:
    assert router.http is not None
    for event_id in ("r/4/5", "r/x", "r", "r/1,", "r/²"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{router.http.port}/v1/completions",
            json.dumps({"prompt": "Hi", "stream": True}).encode(),
            {"Last-Event-ID": event_id},
        )
        with pytest.raises(urllib.error.HTTPError) as raised:
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=240)
        assert raised.value.code == 400
        assert json.load(raised.value)["error"]["param"] == "Last-Event-ID"
        raised.value.close()


async def test_adapters_are_models(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    cluster.scheduler.loras = [
        loads_pb2.LoraInfo(name="tone", path="/adapters/tone", rank=8),
        loads_pb2.LoraInfo(name="task", path="/adapters/task", num_virtual_tokens=4),
    ]
    async with client_of(router) as client:
        models = [model.id async for model in client.models.list()]
        assert (models, (await client.models.retrieve("tone")).id) == (["smollm2", "tone", "task"], "tone")
        made_s = int((cluster.folder.path / "config.json").stat().st_mtime)
        assert {model.created async for model in client.models.list()} == {made_s}
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        for name in ("tone", "task"):
            call = client.completions.create(model=name, prompt="Hi", extra_body={"request_id": name})
            completion, _ = await asyncio.gather(call, answer(cluster, name, tokenizer.encode("Yes")))
            assert (completion.model, completion.choices[0].text) == (name, "Yes")
    natives = {name: cluster.scheduler.requests[name].request for name in ("tone", "task")}
    assert {native.model for native in natives.values()} == {"smollm2"}
    assert (natives["tone"].lora.name, natives["task"].prompt_tuning.name) == ("tone", "task")


async def test_every_error_has_its_status(cluster: Cluster, router: Part) -> None:
    """The statuses are those documented in docs/adapters.md."""
    errors: list[tuple[MidstreamError, type[openai.APIStatusError], int]] = [
        (InvalidArgumentError("no", field="sampling.top_k"), openai.BadRequestError, 400),
        (UnsupportedError("no"), openai.BadRequestError, 400),
        (NotFoundError("no", field="lora.name"), openai.NotFoundError, 404),
        (AlreadyExistsError("no"), openai.ConflictError, 409),
        (OverloadedError("no", retry_after_ms=1500), openai.RateLimitError, 429),
        (ExecutionError("no"), openai.InternalServerError, 500),
    ]
    async with client_of(router) as client:
        for error, kind, status in errors:
            cluster.scheduler.submit_errors.append(error)
            with pytest.raises(kind) as raised:
                await client.completions.create(model="smollm2", prompt="Hi")
            assert raised.value.status_code == status
            if status == 429:
                assert raised.value.response.headers["retry-after-ms"] == "1500"


async def test_a_wrong_field_is_named(router: Part) -> None:
    wrong: list[tuple[dict[str, object], int, str]] = [
        ({"temperature": -1.0}, 400, "temperature"),
        ({"timeout_ms": 0}, 400, "timeout_ms"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"0" * 11 + "9" * 11: 1}}, 400, "logit_bias"),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": [1 << 20]}, 400, "allowed_token_ids"),
        ({"model": "other"}, 404, "model"),
        ({"seed": 1 << 70}, 400, "seed"),
        ({"n": 0}, 400, "n"),
        ({"n": 0, "best_of": 2}, 400, "n"),
        ({"best_of": 200}, 400, "best_of"),
        ({"n": 200}, 400, "n"),
    ]
    async with client_of(router) as client:
        for fields, status, param in wrong:
            with pytest.raises(openai.APIStatusError) as raised:
                await client.completions.create(model="smollm2", prompt="Hi", extra_body=fields)
            assert (raised.value.status_code, raised.value.param) == (status, param)


async def test_a_prediction_provides_drafts(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    async with client_of(router) as client:
        call = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hi"}], extra_body={"request_id": "r"},
            prediction={"type": "content", "content": [{"type": "text", "text": TEXT}]},
        )  # fmt: skip
        await asyncio.gather(call, answer(cluster, "r", tokenizer.encode(TEXT)))
    drafts = cluster.scheduler.requests["r"].request.speculative
    assert drafts.method == pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP
    assert list(drafts.prediction_token_ids) == tokenizer.encode(TEXT, add_special_tokens=False)


async def test_every_response_has_an_id(cluster: Cluster, router: Part) -> None:
    """OpenAI's client returns it as `request_id`. If there is a native request, it is that request's id."""
    async with client_of(router) as client:
        listed = await client.models.with_raw_response.list()
        assert len(listed.headers["x-request-id"]) == 32
        ids: list[str | None] = []
        for fields in ({"request_id": "r", "temperature": -1}, {"no_such_field": 1}, {"no_such_field": 1}):
            with pytest.raises(openai.BadRequestError) as raised:
                await client.completions.create(model="smollm2", prompt="Hi", extra_body=fields)
            ids.append(raised.value.request_id)
        assert ids[0] == "r"
        assert [len(name or "") for name in ids[1:]] == [32, 32]
        assert ids[1] != ids[2]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.get("/no/such/path", cast_to=object)
        assert missing.value.request_id


async def test_a_wrong_method_is_answered_with_all_allowed_ones(router: Part) -> None:
    async with client_of(router) as client:
        for path, methods in (
            ("/files", "GET, HEAD, POST"),
            ("/files/x", "DELETE, GET, HEAD"),
            ("/completions", "POST"),
        ):
            with pytest.raises(openai.APIStatusError) as raised:
                await client.put(path, cast_to=object)
            assert (raised.value.status_code, raised.value.response.headers["allow"]) == (405, methods)
            assert f"/v1{path} does not support PUT; use {methods}" in raised.value.message


@pytest.mark.parametrize(
    ("base", "path", "advice"),
    [
        ("/", "/chat/completions", "use /v1/chat/completions"),
        ("/v1/v1/", "/messages", "use /v1/messages"),
        ("/v1/", "/images/generations", "/openapi.json lists all endpoints"),
    ],
)
async def test_an_unknown_path_is_answered_with_what_to_do(router: Part, base: str, path: str, advice: str) -> None:
    async with client_of(router) as client:
        client.base_url = str(client.base_url).replace("/v1/", base)
        with pytest.raises(openai.NotFoundError, match=f"there is no endpoint {base[:-1]}{path}; {advice}"):
            await client.post(path, cast_to=object, body={})


async def test_unknown_query_parameters_are_refused(router: Part) -> None:
    async with client_of(router) as client:
        for call in (
            client.files.list(extra_query={"page": 2}),
            client.batches.list(extra_query={"page": 2}),
            client.files.retrieve("file-x", extra_query={"page": 2}),
            client.completions.create(model="smollm2", prompt="Hi", extra_query={"page": 2}),
            client.embeddings.create(model="smollm2", input="Hi", extra_query={"page": 2}),
            client.responses.create(model="smollm2", input="Hi", extra_query={"page": 2}),
            client.responses.retrieve("resp_x", include=["file_search_call.results"], extra_query={"page": 2}),
            client.responses.input_items.list("resp_x", extra_query={"page": 2}),
        ):
            with pytest.raises(openai.BadRequestError) as raised:
                await call
            assert raised.value.param == "page"
        assert (await client.get("/models", cast_to=object, options={"params": {"limit": 2}})) is not None
        url = str(client.base_url).replace("/v1/", "/tokenize")
        query = {"api-version": "2024-10-21"}  # as sent by Azure's clients
        assert await client.post(url, cast_to=object, body={"prompt": "Hi"}, options={"params": query}) is not None


async def test_tokenize_lists_fields_that_do_not_change_the_prompt(router: Part) -> None:
    async with client_of(router) as client:
        url = str(client.base_url).replace("/v1/", "/tokenize")
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "add_generation_prompt": True,
            "return_token_strs": True,
        }
        plain = await client.post(url, cast_to=httpx.Response, body=body)
        assert "x-midstream-ignored" not in plain.headers
        more = {"temperature": 0.5, "max_tokens": 5, "stop": ["x"], "metadata": {"a": "b"}, "seed": None}
        answer = await client.post(url, cast_to=httpx.Response, body=body | more)
        assert answer.headers["x-midstream-ignored"] == "temperature, max_tokens, stop, metadata"
        assert answer.json() == plain.json()
        foreign = {"messages": [{"role": "user", "content": "Hi", "cache_control": {"type": "x"}, "a\r\nb: é": 1}]}
        answer = await client.post(url, cast_to=httpx.Response, body=body | foreign)
        assert answer.headers["x-midstream-ignored"] == "messages.cache_control, messages.a%0D%0Ab%3A%20%C3%A9"
        assert answer.json() == plain.json()
        cut = {"truncate_prompt_tokens": -1, "max_tokens": 5}
        answer = await client.post(url, cast_to=httpx.Response, body=body | cut)
        assert "x-midstream-ignored" not in answer.headers


async def test_reasoning_tokens_are_in_the_usage(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """The number is that of the tokens of the reasoning's text, even in a stream that is resumed after one of its
    choices has ended.
    """
    chat = ChatModel(model_format("hermes", "think"))
    router = await cluster.add_router(await cluster.add_detokenizer(), chat=chat)
    assert router.http is not None
    texts = ["<think>\nThe sky.\n</think>\n\nYes.", "<think>\nIs it?\n</think>\n\nNo."]
    num_reasoning = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in ("The sky.", "Is it?"))
    body: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "request_id": "s"}
    async with post_stream(router.http.port, "/v1/chat/completions", streamed) as stream:
        await cluster.scheduler.until(lambda: "s" in cluster.scheduler.requests)
        cluster.scheduler.emit("s", tokenizer.encode(texts[0]), 0)
        cluster.scheduler.end("s", sequences=[0])
        async for event in stream.events():
            if event["choices"][0]["finish_reason"]:
                break
        middle = stream.last_id
        cluster.scheduler.emit("s", tokenizer.encode(texts[1]), 1)
        cluster.scheduler.end("s", sequences=[1])
        *_, last = [event async for event in stream.events()]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    async with post_stream(router.http.port, "/v1/chat/completions", streamed, middle) as stream:
        *_, resumed = [event async for event in stream.events()]
    assert resumed["usage"] == last["usage"]
    async with client_of(router) as client:
        extra = {**body, "n": 1, "request_id": "w"}
        call = client.chat.completions.create(model="smollm2", messages=[], extra_body=extra)
        completion, _ = await asyncio.gather(call, answer(cluster, "w", tokenizer.encode(texts[0])))
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    num_first = len(tokenizer.encode("The sky.", add_special_tokens=False))
    assert completion.usage.completion_tokens_details.reasoning_tokens == num_first


async def test_inputs_of_embeddings_are_texts_or_token_ids(router: Part) -> None:
    async with client_of(router) as client:
        wrong: list[object] = [5, True, [True], [5, "a"], ["a", 5], {"text": "a"}, [None]]
        for value in wrong:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.post("/embeddings", cast_to=object, body={"input": value})
            assert str(raised.value.param).startswith("input")
