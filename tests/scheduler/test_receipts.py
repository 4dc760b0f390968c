"""The scheduler makes a receipt of each ended request, which is the same whatever died in between."""

from __future__ import annotations

import asyncio
import json
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream.clock import SteadyClock
from midstream.errors import ConfigError
from midstream.receipts.digests import LINK_TOKENS, links_of
from midstream.receipts.jwk import ReceiptKey
from midstream.receipts.keys import SigningKey
from midstream.receipts.verify import Statement, check_receipt, check_request, check_tokens
from midstream.security.payload_keys import PayloadKeys, make_payload_key
from protos import generation_pb2 as pb
from protos import journal_pb2, ledger_pb2, receipts_pb2, scheduler_pb2
from scheduler.core.events import StopWordFound
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.records import replay
from scheduler.journal.store import StoredJournal, seal, unseal
from tests.scheduler.harness import LIMITS
from tests.scheduler.running_scheduler import FeedReader, RunningScheduler, run_scheduler, until
from tests.scheduler.test_kept_requests import forgotten, read
from tests.scheduler.test_ledger import entries


def settings(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    keys = tmp_path / "keys"
    if not keys.exists():
        SigningKey.new().write(keys, "first")
    path = str(tmp_path / "journal")
    return {"journal": "log", "journal_path": path, "finished_ttl_s": 60.0, "receipt_keys": str(keys), **fields}


async def ask(scheduler: RunningScheduler, request_id: str, **fields: Any) -> receipts_pb2.GetReceiptResponse:
    query = receipts_pb2.GetReceiptRequest(request_id=request_id, **fields)
    answer: receipts_pb2.GetReceiptResponse = await scheduler.stub.GetReceipt(query)
    return answer


async def keys_of(scheduler: RunningScheduler) -> dict[str, ReceiptKey]:
    answer = await scheduler.stub.ListReceiptKeys(receipts_pb2.ListReceiptKeysRequest())
    return {key.key_id: ReceiptKey.from_proto(key) for key in answer.keys}


async def statement(scheduler: RunningScheduler, request_id: str, **fields: Any) -> Statement:
    """Return the receipt of an ended request, after checking its signature and request."""
    answer = await ask(scheduler, request_id, include_request=True, **fields)
    checked = check_receipt(answer.receipt, await keys_of(scheduler))
    check_request(checked, sha256(answer.request).digest())
    return checked


async def run(scheduler: RunningScheduler, name: str, max_tokens: int = 4, **fields: Any) -> list[int]:
    await scheduler.submit(name, [1, 2, 3], max_tokens=max_tokens, detached=True, **fields)
    tokens, _ = await read(scheduler, name)
    return tokens


async def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_a_receipt_states_request_model_and_answer(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        fields: dict[str, Any] = {
            "sampling": pb.SamplingConfig(seed=77, num_return_sequences=2),
            "tokenizer_fingerprint": "tok",
            "template_fingerprint": "tem",
            "attachment": b"not hashed",
        }
        await scheduler.submit("a", [1, 2, 3], max_tokens=100, detached=True, **fields)
        requests = scheduler.service.engine.core.lifecycle.requests
        await until(lambda: not requests["a"].live_sequences)
        found = await statement(scheduler, "a", num_tokens=[100, 100])
        outputs = [list(sequence.output) for sequence in requests["a"].sequences]
        check_tokens(found, outputs)
        assert [(item.num_tokens, item.finish_reason) for item in found.body.sequences] == [(100, 2), (100, 2)]
        assert (found.body.request_id, found.body.seed, found.body.prompt_tokens) == ("a", 77, 3)
        assert found.leaves == {"model": "print", "tokenizer": "tok", "template": "tem"}
        assert len(found.receipt.nonce) == 16
        other = await run(scheduler, "b")
        assert other == outputs[0][:4]
        assert (await ask(scheduler, "b")).receipt.nonce != found.receipt.nonce


async def test_a_repeated_submit_keeps_the_nonce(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        await run(scheduler, "a")
        nonce = (await ask(scheduler, "a")).receipt.nonce
        assert (await scheduler.submit("a", [1, 2, 3], max_tokens=4, detached=True)).attached
        assert (await ask(scheduler, "a")).receipt.nonce == nonce


async def test_a_takeover_continues_the_chain(tmp_path: Path) -> None:
    values = settings(tmp_path)
    async with run_scheduler(**values) as scheduler:
        await scheduler.worker()
        whole = await run(scheduler, "whole", max_tokens=1000)
        before = (await ask(scheduler, "whole")).receipt
        await scheduler.submit("cut", [1, 2, 3], max_tokens=1000, detached=True)
        requests = scheduler.service.engine.core.lifecycle.requests
        await until(lambda: len(requests["cut"].sequences[0].output) > 2 * LINK_TOKENS)
        # The scheduler ends here, without draining.
    async with run_scheduler(**values) as scheduler:
        after = (await ask(scheduler, "whole")).receipt
        assert (after.body, after.nonce) == (before.body, before.nonce)
        await scheduler.worker()
        tokens, _ = await read(scheduler, "cut")
        assert tokens == whole
        check_tokens(await statement(scheduler, "cut"), [tokens])


def stored(folder: Path) -> StoredJournal:
    store = LogStore(LogFolder(folder))
    store.take_over(least_epoch=1)
    found = store.read()
    store.close()
    return found


def changed(commits: list[tuple[int, bytes]], token: int, new: int) -> list[tuple[int, bytes]]:
    """Return commits with one token replaced, and valid checksums."""
    result = []
    for number, sealed in commits:
        record = journal_pb2.JournalCommit.FromString(unseal(sealed) or b"")
        record.token_ids[:] = [new if value == token else value for value in record.token_ids]
        result.append((number, seal(record.SerializeToString())))
    return result


async def test_tokens_that_were_changed_in_the_journal_are_computed_again(tmp_path: Path) -> None:
    """The checksums are valid, so only the chain shows it."""
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        tokens = await run(scheduler, "a", max_tokens=200)
    journal, clock = stored(tmp_path / "journal"), SteadyClock()
    restored = replay(journal, LIMITS, "print", clock)
    (request,) = restored.requests.values()
    assert (restored.num_damaged, list(request.outputs[0])) == (0, tokens)
    nonce = request.recovered.spec.receipt_nonce
    assert request.links[0] == links_of(nonce, 0, array("I", tokens))[:3]
    assert request.finish is not None

    place = next(index for index in range(70, 128) if tokens.count(tokens[index]) == 1)
    journal.commits = changed(journal.commits, tokens[place], tokens[place] ^ 1)
    restored = replay(journal, LIMITS, "print", clock)
    (request,) = restored.requests.values()
    assert (restored.num_damaged, list(request.outputs[0])) == (1, tokens[:64])
    assert (request.finish, request.ends) == (None, {})


async def test_a_stop_word_found_after_the_end_is_in_the_receipt(tmp_path: Path) -> None:
    """The detokenizer reports it after the scheduler has sent the end; the router asks with the lengths it has seen."""
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        stopping = pb.StoppingConfig(stop_words=["x"])
        await scheduler.submit("a", [1, 2, 3], max_tokens=100, detached=True, stopping=stopping)
        feed = await FeedReader.open(scheduler.stub)
        feed.attach(1, "a")
        tokens: list[int] = []
        while not (batch := await feed.read()).ended:
            tokens += batch.token_ids
        tokens += batch.token_ids
        asked = asyncio.ensure_future(statement(scheduler, "a", num_tokens=[70]))
        await asyncio.sleep(0)
        stop = scheduler_pb2.FeedStop(stream=1, sequence_index=0, num_tokens=70, stop_word="x")
        feed.send(stop=stop)
        found = await asked
        check_tokens(found, [tokens[:70]])
        assert found.body.sequences[0].finish_reason == pb.FINISH_REASON_STOP
        async with asyncio.timeout(240):
            while (await entries(scheduler, 1))[0].receipt.body != found.receipt.body:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.05)
        feed.close()


async def test_the_ledger_keeps_receipts_without_their_nonces(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=0.05)) as scheduler:
        await scheduler.worker()
        outputs = {name: await run(scheduler, name, max_tokens=70) for name in ("a", "b", "c")}
        found = {entry.request_id: entry.receipt for entry in await entries(scheduler, 3)}
        await until(lambda: all(forgotten(scheduler, name) for name in outputs))
        keys = await keys_of(scheduler)
        for name, tokens in outputs.items():
            answer = await ask(scheduler, name, include_request=True)
            assert (answer.receipt, answer.receipt.nonce, answer.request) == (found[name], b"", b"")
            body = check_receipt(answer.receipt, keys).body
            assert (body.request_id, body.sequences[0].num_tokens) == (name, len(tokens))
        assert await status_of(ask(scheduler, "unknown")) is grpc.StatusCode.NOT_FOUND
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        assert (await ask(scheduler, "a")).receipt == found["a"]


async def test_a_running_request_has_no_receipt_yet(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.submit("a", [1, 2, 3], detached=True)
        assert await status_of(ask(scheduler, "a")) is grpc.StatusCode.NOT_FOUND


async def test_keys_rotate_and_old_receipts_verify(tmp_path: Path) -> None:
    values = settings(tmp_path)
    async with run_scheduler(**values) as scheduler:
        await scheduler.worker()
        await run(scheduler, "a")
        (entry,) = await entries(scheduler, 1)
        old = check_receipt(entry.receipt, await keys_of(scheduler))
        new = SigningKey.new()
        later = ReceiptKey(new.public.data, new.public.created_unix_s + 10)
        SigningKey(later, new.secret).write(tmp_path / "keys", "second")
        assert (await ask(scheduler, "a")).receipt.key_id == new.public.key_id
        assert len(await keys_of(scheduler)) == 2
        for name in ("first.jwk_secret", "first.jwk"):
            (tmp_path / "keys" / name).unlink()
        await run(scheduler, "b")
        assert (await ask(scheduler, "b")).receipt.key_id == new.public.key_id
    async with run_scheduler(**values) as scheduler:
        (entry,) = [item for item in await entries(scheduler, 1) if item.request_id == "a"]
        assert check_receipt(entry.receipt, await keys_of(scheduler)).body == old.body


async def test_an_unusable_key_folder_is_an_error_at_the_start_and_ignored_later(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no NAME\.jwk_secret; make one"):
        async with run_scheduler(receipt_keys=str(tmp_path)):
            pass
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        await run(scheduler, "a")
        before = (await ask(scheduler, "a")).receipt
        (tmp_path / "keys" / "broken.jwk_secret").write_text("{}")
        assert (await ask(scheduler, "a")).receipt == before


async def test_a_default_folder_gets_a_key_or_one_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    async with run_scheduler() as scheduler:
        first = await keys_of(scheduler)
    async with run_scheduler() as scheduler:
        assert await keys_of(scheduler) == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "file"))
    async with run_scheduler() as scheduler:
        await scheduler.worker()
        await run(scheduler, "a")
        await statement(scheduler, "a")


async def test_receipts_can_be_off(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, receipts="off", receipt_keys="")) as scheduler:
        await scheduler.worker()
        await run(scheduler, "a", max_tokens=100)
        assert await status_of(ask(scheduler, "a")) is grpc.StatusCode.UNIMPLEMENTED
        asks = pb.OutputConfig(return_receipt=True)
        submitted = scheduler.submit("b", [1, 2, 3], output=asks)
        assert await status_of(submitted) is grpc.StatusCode.UNIMPLEMENTED
        assert not (await entries(scheduler, 1))[0].HasField("receipt")
    records = [
        journal_pb2.JournalCommit.FromString(unseal(sealed) or b"")
        for _, sealed in stored(tmp_path / "journal").commits
    ]
    assert [link for record in records for link in record.links] == []
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        assert await status_of(ask(scheduler, "a")) is grpc.StatusCode.NOT_FOUND
        page = await scheduler.stub.GetLedger(ledger_pb2.GetLedgerRequest())
        assert [entry.request_id for entry in page.entries] == ["a"]


async def test_an_end_amended_while_receipts_are_off_keeps_the_receipts_of_its_page(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        for name in ("a", "b"):
            await scheduler.submit(name, [1, 2, 3], max_tokens=6, keep_s=600, detached=True)
        before = {entry.request_id: entry.receipt for entry in await entries(scheduler, 2)}
        keys = await keys_of(scheduler)
    async with run_scheduler(**settings(tmp_path, receipts="off", receipt_keys="")) as scheduler:
        await read(scheduler, "a")
        engine = scheduler.service.engine
        engine.handle(StopWordFound(engine.now_ns(), "a", 0, 2, "x"))
        async with asyncio.timeout(240):
            while {entry.completion_tokens for entry in await entries(scheduler, 2)} != {2, 6}:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.05)
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        found = {entry.request_id: entry for entry in await entries(scheduler, 2)}
        assert [found[name].completion_tokens for name in ("a", "b")] == [2, 6]
        assert {name: entry.receipt for name, entry in found.items()} == before
        assert [check_receipt(before[name], keys).body.request_id for name in ("a", "b")] == ["a", "b"]


async def test_the_payload_is_stored_encrypted_for_a_time_of_its_own(tmp_path: Path) -> None:
    make_payload_key(tmp_path / "payload", "one")
    fields: dict[str, Any] = {"receipts": "payload", "payload_keys": str(tmp_path / "payload")}
    values = settings(tmp_path, finished_ttl_s=3.0, **fields)
    asked = {"include_request": True, "include_outputs": True}
    async with run_scheduler(**values) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], max_tokens=100, detached=True, cache_salt="a secret of the client")
        tokens, _ = await read(scheduler, "a")
        known = await ask(scheduler, "a", **asked)
        await entries(scheduler, 1)
        await until(lambda: forgotten(scheduler, "a"))
        await until(lambda: not scheduler.service._payloads or not scheduler.service._payloads._writing)
    async with run_scheduler(**values) as scheduler:
        found = await ask(scheduler, "a", **asked)
        assert (found.receipt.body, found.receipt.nonce) == (known.receipt.body, known.receipt.nonce)
        assert (found.request, found.outputs) == (known.request, known.outputs)
        assert [list(output.token_ids) for output in found.outputs] == [tokens]
        bare = await ask(scheduler, "a")
        assert (bare.receipt.nonce, bare.request, list(bare.outputs)) == (known.receipt.nonce, b"", [])
        documents = scheduler.service.journal.documents
        (stored_payload,) = await documents.list("payload")
        assert b"a secret" not in stored_payload.data
        assert stored_payload.expires_ns is not None
        week_ns = 7 * 24 * 3600 * 1_000_000_000
        assert abs(stored_payload.expires_ns - stored_payload.created_ns - week_ns) < 60_000_000_000
    make_payload_key(tmp_path / "other", "two")
    async with run_scheduler(**(values | {"payload_keys": str(tmp_path / "other")})) as scheduler:
        found = await ask(scheduler, "a", **asked)
        assert (found.receipt.body, found.receipt.nonce, found.request) == (known.receipt.body, b"", b"")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"receipts": "payload"}, "payload_keys: must be set"),
        ({"payload_keys": "x"}, "has no meaning unless receipts is payload"),
        ({"receipts": "payload", "payload_keys": "/nonexistent"}, r"has no NAME\.jwk_payload; make one"),
        ({"receipts": "payload", "payload_keys": "x", "payload_ttl_s": 0}, "payload_ttl_s: is 0"),
    ],
)
async def test_settings_of_the_payload_that_cannot_work_are_errors(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with run_scheduler(**fields):
            pass


def test_sealed_payloads_belong_to_their_request_and_keys_rotate(tmp_path: Path) -> None:
    path = make_payload_key(tmp_path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    first = PayloadKeys(tmp_path)
    sealed = first.seal(b"contents", "a")
    assert first.unseal(sealed, "a") == b"contents"
    assert first.unseal(sealed, "b") is None
    for place in range(len(sealed)):
        assert first.unseal(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :], "a") is None
    assert first.unseal(b"", "a") is None
    with pytest.raises(ConfigError, match="exists"):
        make_payload_key(tmp_path, "one")

    second = make_payload_key(tmp_path, "two")
    jwk = json.loads(second.read_text())
    second.write_text(json.dumps(jwk | {"iat": jwk["iat"] + 10}))
    both = PayloadKeys(tmp_path)
    later = both.seal(b"contents", "a")
    assert both.unseal(sealed, "a") == both.unseal(later, "a") == b"contents"
    assert first.unseal(later, "a") is None
    second.write_text("{}")
    with pytest.raises(ConfigError, match="no key of 32 bytes"):
        PayloadKeys(tmp_path)
