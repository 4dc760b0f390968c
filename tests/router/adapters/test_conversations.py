"""The Conversations API, with OpenAI's official client and a scripted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from midstream.errors import InvalidArgumentError
from midstream.model.tokenizer import Tokenizer
from router.authentication import Authenticator, TokenFile
from router.protocols.responses.conversations import Conversations, Entry, StoredConversation
from router.protocols.responses.items import Item
from tests.router.adapters.clients import client_of
from tests.router.adapters.test_responses import answered, events_of, write
from tests.router.conftest import Cluster, Part

HELLO: Any = {"type": "message", "role": "user", "content": "Hello"}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "c", "output": "5"}


async def texts_of(client: openai.AsyncOpenAI, conversation_id: str) -> list[tuple[str, str]]:
    """Return the role and the text of each message of a conversation, in order."""
    items = [item async for item in client.conversations.items.list(conversation_id, order="asc")]
    found = [item.to_dict() for item in items]
    return [(item["role"], item["content"][0]["text"]) for item in found if item["type"] == "message"]


async def test_a_conversation_is_created_changed_and_deleted(client: openai.AsyncOpenAI) -> None:
    created = await client.conversations.create(items=[HELLO], metadata={"a": "b"})
    assert created.id.startswith("conv_")
    assert (created.object, created.metadata) == ("conversation", {"a": "b"})
    assert await client.conversations.retrieve(created.id) == created
    updated = await client.conversations.update(created.id, metadata={"c": "d"})
    assert updated.metadata == {"c": "d"}
    assert (await client.conversations.retrieve(created.id)).metadata == {"c": "d"}
    deleted = await client.conversations.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (created.id, True, "conversation.deleted")
    for call in (client.conversations.retrieve(created.id), client.conversations.delete(created.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    assert (await client.conversations.create()).metadata == {}


async def test_items_are_added_listed_retrieved_and_removed(client: openai.AsyncOpenAI) -> None:
    conversation = await client.conversations.create(items=[HELLO])
    added = await client.conversations.items.create(conversation.id, items=[CALL, RESULT])
    assert [item.type for item in added.data] == ["function_call", "function_call_output"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
    for limit in (1, 2, 3):
        found = [item async for item in client.conversations.items.list(conversation.id, limit=limit, order="asc")]
        assert [item.type for item in found] == ["message", "function_call", "function_call_output"]
    newest = await client.conversations.items.list(conversation.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (added.data[1].id, True)
    first = await client.conversations.items.retrieve(str(found[0].id), conversation_id=conversation.id)
    assert first.to_dict() == {
        "id": found[0].id, "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "Hello"}],
    }  # fmt: skip
    after = await client.conversations.items.delete(str(found[0].id), conversation_id=conversation.id)
    assert after == conversation
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(str(found[0].id), conversation_id=conversation.id)
    assert len((await client.conversations.items.list(conversation.id)).data) == 2


async def test_a_call_that_is_repeated_with_its_key_adds_items_once(client: openai.AsyncOpenAI) -> None:
    conversation = await client.conversations.create(items=[HELLO, CALL])
    key: Any = {"extra_headers": {"Idempotency-Key": "k"}}
    added = await client.conversations.items.create(conversation.id, items=[RESULT, HELLO], **key)
    again = await client.conversations.items.create(conversation.id, items=[RESULT, HELLO], **key)
    assert again == added
    assert len((await client.conversations.items.list(conversation.id)).data) == 4
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key: was used with other items"):
        await client.conversations.items.create(conversation.id, items=[HELLO], **key)
    other = await client.conversations.create(items=[CALL])
    await client.conversations.items.create(other.id, items=[RESULT, HELLO], **key)
    assert len((await client.conversations.items.list(other.id)).data) == 3


async def test_the_output_of_a_call_can_be_added_after_the_call(client: openai.AsyncOpenAI) -> None:
    conversation = await client.conversations.create(items=[HELLO, CALL])
    added = await client.conversations.items.create(conversation.id, items=[RESULT])
    assert [item.type for item in added.data] == ["function_call_output"]
    with pytest.raises(openai.BadRequestError, match="no call 'd'"):
        await client.conversations.items.create(conversation.id, items=[{**RESULT, "call_id": "d"}])


async def test_responses_of_a_conversation_continue_it(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    conversation = await client.conversations.create(items=[{"role": "system", "content": "Be brief."}])
    ids = tokenizer.encode("Paris.")
    call = client.responses.create(model="smollm2", input="Capital of France?", conversation=conversation.id)
    first = await answered(cluster, call, ids)
    assert first.conversation.id == conversation.id
    call = client.responses.create(model="smollm2", input="And of Spain?", conversation={"id": conversation.id})
    await answered(cluster, call, tokenizer.encode("Madrid."), 1)
    said = [
        ("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris."), ("user", "And of Spain?"),
        ("assistant", "Madrid."),
    ]  # fmt: skip
    assert await texts_of(client, conversation.id) == said
    prompts = [
        tokenizer.decode(list(script.request.token_ids.values), skip_special_tokens=False)
        for script in cluster.scheduler.requests.values()
    ]
    assert [text in prompts[1] for _, text in said] == [True, True, True, True, False]
    assert "Spain" not in prompts[0]
    # A response that is deleted leaves its items, as does a stream.
    await client.responses.delete(first.id)
    counted = await client.responses.input_tokens.count(model="smollm2", input="x", conversation=conversation.id)
    last = list(cluster.scheduler.requests.values())[-1].request
    assert counted.input_tokens > len(last.token_ids.values)

    async def streamed() -> None:
        stream = await client.responses.create(model="smollm2", input="Bye", conversation=conversation.id, stream=True)
        async for _ in stream:
            pass

    number = len(cluster.scheduler.requests)
    await answered(cluster, streamed(), tokenizer.encode("Bye!"), number)
    assert await texts_of(client, conversation.id) == [*said, ("user", "Bye"), ("assistant", "Bye!")]


async def test_another_router_adds_the_items_of_a_response_whose_router_died(
    cluster: Cluster, client: openai.AsyncOpenAI, router: Part, tokenizer: Tokenizer
) -> None:
    conversation = await client.conversations.create()
    started = await client.responses.create(model="smollm2", input="Hi", conversation=conversation.id, background=True)
    other = await cluster.add_router(await cluster.add_detokenizer("e"))
    await router.kill()
    async with client_of(other) as again:
        assert await texts_of(again, conversation.id) == []
        with pytest.raises(openai.BadRequestError, match="has not ended") as refused:
            await again.responses.create(model="smollm2", input="x", conversation=conversation.id)
        assert refused.value.param == "conversation"
        await write(cluster, tokenizer.encode("Hello."))
        assert (await events_of(again, started.id))[-1]["type"] == "response.completed"
        assert await texts_of(again, conversation.id) == [("user", "Hi"), ("assistant", "Hello.")]


async def test_a_refused_response_leaves_no_trace_and_a_repeated_one_is_added_once(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    conversation = await client.conversations.create()
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="smollm2", input="word " * 20_000, conversation=conversation.id)
    fields: dict[str, Any] = {"model": "smollm2", "input": "Hi", "conversation": conversation.id}
    fields["extra_headers"] = {"Idempotency-Key": "k"}
    first = await answered(cluster, client.responses.create(**fields), tokenizer.encode("Hello."))
    assert await texts_of(client, conversation.id) == [("user", "Hi"), ("assistant", "Hello.")]
    assert (await client.responses.create(**fields)).id == first.id
    assert await texts_of(client, conversation.id) == [("user", "Hi"), ("assistant", "Hello.")]
    assert len(cluster.scheduler.requests) == 1


async def test_invalid_calls_are_refused_by_field(client: openai.AsyncOpenAI) -> None:
    conversation = await client.conversations.create(extra_headers={"Idempotency-Key": "k"})
    assert await client.conversations.create(extra_headers={"Idempotency-Key": "k"}) == conversation
    create, add = client.conversations.create, client.conversations.items.create
    respond = client.responses.create
    cases: list[tuple[Any, str]] = [
        (create(items=[HELLO] * 21), "items"),
        (create(items=[{**HELLO, "role": "x"}]), "items[0].role"),
        (create(items=[HELLO, {"type": "item_reference", "id": "msg_1"}]), "items[1].type"),
        (create(items=[HELLO, {"type": "computer_call", "id": "x"}]), "items[1].type"),
        (create(items=[RESULT]), "items[0].call_id"),
        (create(metadata={"a": "x" * 513}), "metadata"),
        (create(extra_body={"name": "x"}), "name"),
        (client.post(f"/conversations/{conversation.id}", body={}, cast_to=object), "metadata"),
        (add(conversation.id, items=[]), "items"),
        (add("conv_1", items=[HELLO]), "conversation"),
        (client.conversations.items.list(conversation.id, after="msg_1"), "after"),
        (respond(model="", input="x", conversation="x"), "conversation"),
        (respond(model="", input="x", conversation={}), "conversation"),
        (respond(model="", input="x", conversation=conversation.id, store=False), "conversation"),
        (respond(model="", input="x", conversation=conversation.id, previous_response_id="resp_1"), "conversation"),
    ]
    for call, param in cases:
        with pytest.raises(openai.APIStatusError) as raised:
            await call
        assert (raised.value.status_code in (400, 404, 501), raised.value.param) == (True, param)


async def test_only_the_owner_finds_a_conversation(cluster: Cluster, tmp_path: Path) -> None:
    tokens = [f"{name}-0123456789abcdef" for name in ("alice", "bob")]
    (tmp_path / "tokens").write_text("".join(f"{token} {token[:3]}\n" for token in tokens))
    router = await cluster.add_router(authenticator=Authenticator(tokens=TokenFile(str(tmp_path / "tokens"))))
    async with client_of(router) as client:
        alice, bob = (client.with_options(api_key=token) for token in tokens)
        conversation = await alice.conversations.create(items=[HELLO])
        assert len((await alice.conversations.items.list(conversation.id)).data) == 1
        for call in (bob.conversations.retrieve(conversation.id), bob.conversations.delete(conversation.id)):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_conversation_has_a_largest_size(client: openai.AsyncOpenAI) -> None:
    """It is that of a body: 4 MiB here."""
    conversation = await client.conversations.create()
    long: Any = {**HELLO, "content": "x" * (1 << 20)}
    for _ in range(3):
        await client.conversations.items.create(conversation.id, items=[long])
    with pytest.raises(openai.BadRequestError, match="begin another one") as refused:
        await client.conversations.items.create(conversation.id, items=[long])
    assert refused.value.param == "conversation"
    assert len((await client.conversations.items.list(conversation.id)).data) == 3


async def test_a_conversation_that_a_response_has_made_too_large_can_be_read_and_shortened(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    """The conversation has 3 MiB of at most 4 MiB; the response adds an input of 1 MiB."""
    conversation = await client.conversations.create()
    long: Any = {**HELLO, "note": "x" * (1 << 20)}  # the prompt does not have the note
    for _ in range(3):
        await client.conversations.items.create(conversation.id, items=[long])
    call = client.responses.create(model="smollm2", input=[long], conversation=conversation.id)
    first = await answered(cluster, call, tokenizer.encode("Hello."))
    await client.responses.delete(first.id)
    items = (await client.conversations.items.list(conversation.id, order="asc")).data
    assert len(items) == 5
    with pytest.raises(openai.BadRequestError, match="begin another one"):
        await client.responses.create(model="smollm2", input="x", conversation=conversation.id)
    for item in items[:2]:
        await client.conversations.items.delete(str(item.id), conversation_id=conversation.id)
    call = client.responses.create(model="smollm2", input="x", conversation=conversation.id)
    await answered(cluster, call, tokenizer.encode("Yes."))
    assert (await texts_of(client, conversation.id))[-1] == ("assistant", "Yes.")


async def test_a_conversation_can_be_read_when_its_client_may_not_store_more(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await client.conversations.create(items=[{**HELLO, "note": "x" * (32 << 10)}])
    call = client.responses.create(model="smollm2", input="Hi", conversation=conversation.id)
    response = await answered(cluster, call, tokenizer.encode("Hello."))
    with monkeypatch.context() as patched:
        patched.setattr(cluster.scheduler, "_max_owner_bytes", 0)
        said = [("user", "Hello"), ("user", "Hi"), ("assistant", "Hello.")]
        assert await texts_of(client, conversation.id) == said
        with pytest.raises(openai.RateLimitError):  # its items would be lost
            await client.with_options(max_retries=0).responses.delete(response.id)
    await client.responses.delete(response.id)
    assert await texts_of(client, conversation.id) == said


def test_responses_are_replaced_in_place_and_lost_ones_are_dropped() -> None:
    one: Item = {"id": "1"}
    two: Item = {"id": "2"}
    entries = [Entry(one), Entry(None, "resp_1", 100.0), Entry(None, "resp_2", 100.0)]
    found = StoredConversation("conv_1", 0, {}, entries)
    assert StoredConversation("conv_1", 0, {}, entries[:1]).before("") == found.before("resp_1") == [one]
    with pytest.raises(InvalidArgumentError, match="not ended"):
        found.before("resp_2")
    found.settle({"resp_1": [two]})
    assert (found.items, found.before("resp_2")) == ([one, two], [one, two])
    assert found.before("resp_1") == [one]  # for a call that is repeated with its key
    found.settle({"resp_2": [one, {"id": "3"}]})  # the client has sent the first item again
    assert [item["id"] for item in found.items] == ["1", "2", "msg_2_again_0", "3"]
    found.entries.append(Entry(None, "resp_3", 100.0))
    for timeout_s, lost_at in ((30.0, 160.0), (120.0, 340.0)):
        stored = Conversations(Mock(), 3600, 1 << 20, timeout_s)
        assert [stored.is_lost(found.waiting[0], lost_at + by) for by in (-1, 1)] == [False, True]
