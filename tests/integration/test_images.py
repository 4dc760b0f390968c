"""Images through the whole service: tokens equal those of transformers, even if a process is killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import grpc
import openai
import pytest
from PIL import Image

from midstream.client import AsyncClient
from midstream.executor import GenerationExecutor, MultimodalParams, SamplingParams
from protos import generation_pb2 as pb
from protos import loads_pb2
from tests.gpu_worker.vision_model import CHAT_TEMPLATE, inputs_of, make_vision_model, picture
from tests.integration.holding import NAME, Hold
from tests.integration.service import Service, collect, eventually, stub_of

MAX_TOKENS, LONG = 40, 100
RED, BLUE = picture(60, 31, seed=1), picture(20, 50, seed=2, kind="WEBP")


@dataclass(frozen=True)
class Vision:
    """The service, and transformers' model and tokenizer."""

    service: Service
    case: str
    model: Any
    tokenizer: Any
    hold: Hold

    def expected(self, prompt: str, images: Sequence[Image.Image], max_tokens: int = MAX_TOKENS) -> list[int]:
        """Return the tokens that transformers generates."""
        inputs = inputs_of(self.case, self.tokenizer, prompt, images)
        made = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
        tokens: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    def prompt(self, parts: Sequence[dict[str, Any]]) -> str:
        """Return the prompt for a message of these parts."""
        prompt: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": list(parts)}],
            chat_template=CHAT_TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
        )
        return prompt

    def metric(self, name: str) -> float:
        """Return a metric of the scheduler."""
        (scheduler,) = self.service.processes("scheduler")
        with urllib.request.urlopen(f"http://{scheduler['addresses']['http']}/metrics", timeout=240) as response:
            lines = response.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"midstream:{name} ")))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    yield from serve("idefics3", tmp_path_factory)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    yield from serve("mistral3", tmp_path_factory)


def serve(case: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = make_vision_model(folder, case)
    hold = Hold(tmp_path_factory.mktemp("hold"))
    service = Service.start(
        tmp_path_factory.mktemp("service"),
        "--model",
        str(folder),
        "--workers",
        "2",
        MIDSTREAM_WORKER_TIMEOUT_MS="30000",
        # Two workers that are killed one after the other start slowly while other tests run.
        MIDSTREAM_NO_WORKER_TIMEOUT_S="120",
        MIDSTREAM_KV="f32",
        **hold.settings,
    )
    yield Vision(service, case, model, tokenizer, hold)
    service.stop()


def request(prompt: str, *images: bytes) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=prompt,
        images=[pb.Image(data=data) for data in images],
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingConfig(temperature=0),
        stopping=pb.StoppingConfig(ignore_eos=True),
    )


def test_the_executor_takes_files_and_images(vision: Vision) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with GenerationExecutor.create(address=vision.service.routers()[0]) as executor:
        for image in RED:  # as an image of Pillow, and as a file
            result = executor.generate("See <image>?", params, multimodal_params=MultimodalParams({"image": image}))
            assert result.outputs[0].token_ids == vision.expected("See <image>?", [RED[0]])


async def test_each_api_gives_the_tokens_of_transformers_and_encodes_an_image_once(vision: Vision) -> None:
    wanted = vision.expected("See <image>?", [RED[0]])
    before = vision.metric("num_encoded_images_total"), vision.metric("num_cached_images_total")
    async with stub_of(vision.service.routers()[0]) as stub:
        assert (await collect(stub, request("See <image>?", RED[1]))).token_ids == wanted
        assert (await collect(stub, request("See <image>?", BLUE[1]))).token_ids != wanted
    # Two images in a chat, one of them new to the service but equal to another in the request.
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "What is "},
        {"type": "image"},
        {"type": "text", "text": " beside "},
        {"type": "image"},
    ]
    prompt = vision.prompt(parts)
    wanted = vision.expected(prompt, [BLUE[0], RED[0]])
    for part, (_, data) in zip((parts[1], parts[3]), (BLUE, RED), strict=True):
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        part |= {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    messages: Any = [{"role": "user", "content": parts}]
    (router,) = vision.service.processes("router")
    client = openai.AsyncOpenAI(base_url=f"http://{router['addresses']['http']}/v1", api_key="none", max_retries=0)
    async with client:
        answer = await client.chat.completions.create(
            model="",
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        (choice,) = answer.choices
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == wanted
        for url, reason in (
            ("https://example.com/a.png", "not fetched"),
            ("data:image/png;base64,AAAA", "not an image"),
        ):
            broken: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            with pytest.raises(openai.BadRequestError, match=reason) as raised:
                await client.chat.completions.create(model="", messages=broken)
            assert raised.value.param == "messages[0].content[0].image_url.url"
        encoded = base64.b64encode(RED[1]).decode()
        item: Any = {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See "},
                {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{encoded}"},
            ],
        }
        limits: Any = {"temperature": 0, "max_output_tokens": MAX_TOKENS}
        response = await client.responses.create(model="", input=[item], **limits)
    async with anthropic.AsyncAnthropic(
        base_url=str(client.base_url).removesuffix("/v1/"), api_key="none", max_retries=0
    ) as other:
        source: Any = {"type": "base64", "media_type": "image/png", "data": encoded}
        seen: Any = [{"type": "text", "text": "See "}, {"type": "image", "source": source}]
        ask: Any = {"model": "", "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
        message = await other.messages.create(messages=[{"role": "user", "content": seen}], **ask)
        source["data"] = "AAAA"
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[1\].source.data: is not an image"):
            await other.messages.create(messages=[{"role": "user", "content": seen}], **ask)
    prompt = vision.prompt([{"type": "text", "text": "See "}, {"type": "image"}])
    wanted = vision.expected(prompt, [RED[0]])
    for text in (response.output_text, "".join(block.text for block in message.content if block.type == "text")):
        assert vision.tokenizer.decode(wanted, skip_special_tokens=True).startswith(text)
        assert text
    after = vision.metric("num_encoded_images_total"), vision.metric("num_cached_images_total")
    # Other tests may have asked for the same images before.
    assert sum(after) - sum(before) == 6
    assert after[0] == 2


async def test_images_that_do_not_fit_the_prompt_are_refused(vision: Vision) -> None:
    both = request("<image><image>", RED[1])
    both_texts = request("x", RED[1])
    logs = request("<image>", RED[1])
    logs.output.prompt_log_probs = 1
    part = pb.ContentPart(image=pb.Image(data=b""))
    empty = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", parts=[part])]))
    cases = [
        (both, "prompt"),
        (both_texts, "prompt"),
        (logs, "output.prompt_log_probs"),
        (empty, "chat.messages[0].parts[0].image.data"),
    ]
    async with stub_of(vision.service.routers()[0]) as stub:
        for refused, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await collect(stub, refused)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(raised.value.trailing_metadata() or ())["midstream-field"] == field


async def test_the_death_of_a_worker_that_encodes_or_generates_changes_no_token(vision: Vision) -> None:
    image, data = picture(64, 64, seed=9)
    wanted = vision.expected("<image> is", [image], LONG)
    async with stub_of(vision.service.routers()[0]) as stub, AsyncClient(vision.service.routers()) as client:

        async def groups() -> Sequence[loads_pb2.WorkerGroupInfo]:
            return (await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=240)).worker_groups

        async def running() -> float:
            return vision.metric("num_images_running")

        # While there are no other requests, the first worker gets the image.
        first = (await groups())[0].group_id
        parts = vision.service.processes("gpu_worker")
        pid = next(int(part["pid"]) for part in parts if first.endswith(str(part["name"])))
        os.kill(pid, signal.SIGSTOP)
        answer = asyncio.create_task(client.stream(request("<image> is", data)).result())
        assert await eventually(running, lambda count: count == 1, 60) == 1
        os.kill(pid, signal.SIGKILL)
        assert list((await answer).sequences[0].token_ids) == wanted[:MAX_TOKENS]

        # The worker is paused in the middle of the sequence until it is killed.
        long = request("<image> is", data)
        long.max_tokens, long.logits_post_processor_name = LONG, NAME

        async def read() -> list[int]:
            return [token async for chunk in client.stream(long) for token in chunk.token_ids]

        with vision.hold:
            reading = asyncio.create_task(read())
            os.kill(await vision.hold.held(), signal.SIGKILL)
        assert await reading == wanted
        assert vision.metric("num_recoveries_total") == 1
    assert json.dumps(wanted)


async def test_the_death_of_the_scheduler_while_an_image_is_encoded_changes_no_token(vision: Vision) -> None:
    image, data = picture(33, 64, seed=11)
    wanted = vision.expected("<image>", [image])
    (scheduler,) = vision.service.processes("scheduler")
    # The image must not go to a worker that an earlier test killed and that has not registered again yet.
    workers = await vision.service.all_serving("gpu_worker")

    async def running() -> float:
        return vision.metric("num_images_running")

    async with AsyncClient(vision.service.routers()) as client:
        for worker in workers:
            os.kill(worker["pid"], signal.SIGSTOP)
        try:
            answer = asyncio.create_task(client.stream(request("<image>", data)).result())
            assert await eventually(running, lambda count: count == 1, 60) == 1
            os.kill(scheduler["pid"], signal.SIGKILL)
        finally:
            for worker in workers:
                os.kill(worker["pid"], signal.SIGCONT)
        assert list((await answer).sequences[0].token_ids) == wanted


async def test_another_family_reads_several_images_whichever_process_is_killed(mistral: Vision) -> None:
    """Mistral 3, whose images have as many tokens as their sizes require. Each kill hits another request."""
    images = [RED, BLUE]
    parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    wanted = mistral.expected(mistral.prompt(parts), [image for image, _ in images], LONG)
    contents = [pb.ContentPart(text=part["text"]) if "text" in part else pb.ContentPart() for part in parts]
    contents[0].image.data, contents[2].image.data = RED[1], BLUE[1]
    chat = request("")
    chat.chat.messages.add(role="user", parts=contents)
    chat.max_tokens = LONG
    held = pb.GenerateRequest()
    held.CopyFrom(chat)  # before the client gives the other an id
    held.logits_post_processor_name = NAME

    async def running() -> float:
        return mistral.metric("num_images_running")

    async with AsyncClient(mistral.service.routers()) as client:
        workers = await mistral.service.all_serving("gpu_worker")
        for worker in workers:
            os.kill(worker["pid"], signal.SIGSTOP)
        answer = asyncio.create_task(client.stream(chat).result())
        assert await eventually(running, lambda count: count >= 1, 60) >= 1
        os.kill(workers[0]["pid"], signal.SIGKILL)
        os.kill(workers[1]["pid"], signal.SIGCONT)
        assert list((await answer).sequences[0].token_ids) == wanted

        with mistral.hold:
            reading = asyncio.create_task(client.stream(held).result())
            os.kill(await mistral.hold.held(), signal.SIGKILL)
        assert list((await reading).sequences[0].token_ids) == wanted
