"""A stored response streamed by OpenAI's client, and a message retried by Anthropic's client, while a component is
killed at each token.

As in test_kill_at_every_step.py, a different component is killed at each token; with TEST_ALL_KILLS=1, every
component is killed at every token.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from midstream.model.folder import ModelFolder, open_model_folder
from tests.faults.in_process_service import KINDS, InProcessService
from tests.faults.small_model import make_small_model
from tests.integration.api_clients import plain_http

NUM_TOKENS = 24
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
HEADER = "Idempotency-Key"
MESSAGE: Any = {
    "model": "",
    "messages": [{"role": "user", "content": "Go on."}],
    "max_tokens": NUM_TOKENS,
    "extra_body": {"temperature": 0},
}
ROTATIONS = range(4) if os.environ.get("TEST_ALL_KILLS") else (2,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = make_small_model(tmp_path_factory.mktemp("small"))
    (folder.path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return open_model_folder(str(folder.path))


@pytest.fixture
async def service(folder: ModelFolder, tmp_path: Path) -> AsyncIterator[InProcessService]:
    service = InProcessService(folder, tmp_path / "journal")
    await service.start()
    yield service
    await service.close()


class Reader:
    """Reads one response, switching to another router when one dies.

    Attributes:
        events: Events in order of arrival.
        num_breaks: Number of times the stream broke.
    """

    def __init__(self, service: InProcessService, *, is_background: bool, conversation: str | None = None) -> None:
        self._conversation = conversation
        self.events: list[dict[str, Any]] = []
        self.num_breaks = 0
        self._rig = service
        self._is_background = is_background
        # A router may die before it has sent the response's id. With a key, the next call returns the same response.
        self._headers = {HEADER: str(uuid.uuid4())}

    async def read(self) -> None:
        """Read the stream to its end."""
        while not (self.events and self.events[-1]["type"] in ("response.incomplete", "response.completed")):
            async with self.client() as client:
                try:
                    async for event in await self._stream(client):
                        self.events.append(event.to_dict())
                except openai.APIStatusError:
                    raise
                except openai.APIError:
                    self.num_breaks += 1

    async def _stream(self, client: openai.AsyncOpenAI) -> Any:
        if self.events:
            after = self.events[-1]["sequence_number"]
            return await client.responses.retrieve(self.response_id, stream=True, starting_after=after)
        return await client.responses.create(
            model="", input="Go on.", stream=True, background=self._is_background, max_output_tokens=NUM_TOKENS,
            temperature=0, extra_headers=self._headers, conversation=self._conversation,
        )  # fmt: skip

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self._rig.next_url() + "/v1", api_key="none", max_retries=0, timeout=30, http_client=plain_http()
        )

    @property
    def response_id(self) -> str:
        response_id: str = self.events[0]["response"]["id"]
        return response_id

    async def read_again(self) -> list[dict[str, Any]]:
        """Return all events of the stored response."""
        async with self.client() as client:
            stream = await client.responses.retrieve(self.response_id, stream=True)
            return [event.to_dict() async for event in stream]


def deltas(events: list[dict[str, Any]]) -> list[str]:
    return [event["delta"] for event in events if "delta" in event]


@pytest.mark.parametrize("is_background", [False, True])
async def test_the_events_are_identical_after_any_death_at_any_token(
    service: InProcessService, is_background: bool
) -> None:
    undisturbed = Reader(service, is_background=is_background)
    await service.disturb(undisturbed.read(), {})
    for rotation in ROTATIONS:
        reader = Reader(service, is_background=is_background)
        await service.disturb(reader.read(), {n: KINDS[(n + rotation) % 4] for n in range(1, NUM_TOKENS)})
        assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
        assert deltas(reader.events) == deltas(undisturbed.events)
        assert reader.events == await reader.read_again()
        assert reader.num_breaks
    assert sum(service.num_kills.values()) >= (NUM_TOKENS - 1) * len(ROTATIONS)
    print(service.num_kills, len(undisturbed.events), "".join(deltas(undisturbed.events)))


async def test_a_conversation_has_each_answer_once_after_any_death_at_any_token(service: InProcessService) -> None:
    async with Reader(service, is_background=False).client() as client:
        conversation = await client.conversations.create()
    answers: list[str] = []
    for rotation in ROTATIONS:
        for is_background in (False, True):
            reader = Reader(service, is_background=is_background, conversation=conversation.id)
            await service.disturb(reader.read(), {n: KINDS[(n + rotation) % 4] for n in range(1, NUM_TOKENS, 2)})
            answers.append("".join(deltas(reader.events)))
    async with reader.client() as client:
        items = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
    texts = [item.to_dict()["content"][0]["text"] for item in items]
    assert texts == [text for answer in answers for text in ("Go on.", answer)]
    assert len(set(answers)) == len(answers)  # each continues those before it


async def test_a_message_that_is_called_again_with_its_key_is_the_same(service: InProcessService) -> None:
    num_breaks = 0

    async def read(key: str) -> None:
        nonlocal num_breaks
        while key not in answers:
            async with anthropic.AsyncAnthropic(
                base_url=service.next_url(), api_key="none", max_retries=0, timeout=30, default_headers={HEADER: key}
            ) as client:
                try:
                    async with client.messages.stream(**MESSAGE) as stream:
                        answers[key] = await stream.get_final_message()
                except anthropic.APIStatusError:
                    raise
                except (anthropic.APIError, httpx2.HTTPError):
                    num_breaks += 1

    answers: dict[str, Any] = {}
    await service.disturb(read("undisturbed"), {})
    for rotation in ROTATIONS:
        kills = {n: KINDS[(n + rotation) % 4] for n in range(1, NUM_TOKENS, 1 if len(ROTATIONS) > 1 else 3)}
        await service.disturb(read(f"{rotation}"), kills)
        made, expected = answers[f"{rotation}"], answers["undisturbed"]
        assert (made.content, made.stop_reason) == (expected.content, expected.stop_reason)
        assert made.usage.output_tokens == expected.usage.output_tokens == NUM_TOKENS
    assert num_breaks
    print(service.num_kills, num_breaks, answers["undisturbed"].content)
