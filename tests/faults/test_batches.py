"""A batch completes while processes of every component are killed, including the routers that run it and the scheduler.

For a longer run, set BATCH_LINES=1000 BATCH_KILLS=30 BATCH_TOKENS=400 and raise the time limits (--timeout 1800
-o faulthandler_timeout=1800).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import sqlite3
from typing import Any

import openai

from midstream.client import AsyncClient
from protos import ledger_pb2
from tests.faults.processes import ALL, Processes, until

NUM_LINES = int(os.environ.get("BATCH_LINES", "48"))
NUM_KILLS = int(os.environ.get("BATCH_KILLS", "4"))
MAX_TOKENS = int(os.environ.get("BATCH_TOKENS", "24"))
PATH = "/v1/chat/completions"


def line(number: int, user: str) -> str:
    body = {
        "model": "",
        "messages": [{"role": "user", "content": f"Count on from {number}."}],
        "max_completion_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "user": user,
    }
    if number % 16 == 7:
        body["n"] = 0  # refused
    return json.dumps({"custom_id": f"line {number}", "method": "POST", "url": PATH, "body": body})


class Api:
    """OpenAI's client, connected to any router that answers."""

    def __init__(self, processes: Processes) -> None:
        self._clients = [
            openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20)
            for url in processes.urls
        ]

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        for attempt in range(1000):
            found: Any = self._clients[attempt % 2]
            for part in name.split("."):
                found = getattr(found, part)
            try:
                return await found(*arguments, **options)
            except openai.APIStatusError as error:
                if error.status_code < 500:
                    raise
            except openai.APIConnectionError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError("no router answers")

    async def create(self, user: str) -> Any:
        data = "\n".join(line(number, user) for number in range(NUM_LINES)).encode()
        key = {"Idempotency-Key": user}
        file = await self.call("files.create", file=("in.jsonl", data), purpose="batch", extra_headers=key)
        return await self.call(
            "batches.create", input_file_id=file.id, endpoint=PATH, completion_window="24h", extra_headers=key
        )

    async def ended(self, batch: Any) -> Any:
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.2)
            batch = await self.call("batches.retrieve", batch.id)
        return batch

    async def rows(self, file_id: str) -> list[dict[str, Any]]:
        text = (await self.call("files.content", file_id)).text
        return [json.loads(row) for row in text.splitlines()]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def same(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the fields that differ between batches: ids, times and cached tokens."""
    response = row["response"]
    body = {name: value for name, value in response["body"].items() if name not in ("id", "created")}
    if "usage" in body:
        body["usage"].pop("prompt_tokens_details", None)
    return {"custom_id": row["custom_id"], "status": response["status_code"], "body": body, "error": row["error"]}


async def test_a_batch_has_the_same_output_whatever_dies(processes: Processes, client: AsyncClient) -> None:
    dice, num_kills = random.Random(22), 0
    api = Api(processes)

    async def disturb() -> None:
        nonlocal num_kills
        order: list[str] = []
        while num_kills < NUM_KILLS:
            if not order:
                order = dice.sample(ALL, len(ALL))
            name = order.pop()
            await processes.kill(name)
            num_kills += 1
            processes.start(name)
            await asyncio.sleep(dice.uniform(0.3, 1.2))
            if num_kills % 3 == 0:
                await processes.stand()

    disturbed = await api.create("disturbed")
    async with asyncio.timeout(1500):
        killer = asyncio.create_task(disturb())
        disturbed = await api.ended(disturbed)
        print(f"{NUM_LINES} lines, {num_kills} kills")
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        await processes.make_whole(client)
        quiet = await api.ended(await api.create("quiet"))
    assert (disturbed.status, quiet.status) == ("completed", "completed")
    assert disturbed.request_counts == quiet.request_counts
    found = [await api.rows(batch.output_file_id) for batch in (disturbed, quiet)]
    errors = [await api.rows(batch.error_file_id) for batch in (disturbed, quiet)]
    await api.close()
    for first, second in (found, errors):
        assert list(map(same, first)) == list(map(same, second))
    names = [row["custom_id"] for row in found[0] + errors[0]]
    assert sorted(names) == sorted(f"line {number}" for number in range(NUM_LINES))
    assert {row["response"]["status_code"] for row in errors[0]} == {400}
    for user, rows in zip(("disturbed", "quiet"), found, strict=True):
        used = [row["response"]["body"]["usage"] for row in rows]
        totals = [sum(usage[name] for usage in used) for name in ("prompt_tokens", "completion_tokens")]
        assert totals[1] == MAX_TOKENS * len(rows)
        await until(functools.partial(is_billed, processes, user, [len(rows), *totals]))


def is_billed(processes: Processes, client_id: str, expected: list[int]) -> bool:
    """Return whether the ledger has these numbers of requests, prompt tokens and completion tokens for a client."""
    path = processes.journal_path.with_name(processes.journal_path.name + ".documents")
    with contextlib.closing(sqlite3.connect(path)) as documents:
        pages = documents.execute("SELECT data FROM midstream_documents WHERE kind = 'ledger'").fetchall()
    entries = [entry for (page,) in pages for entry in ledger_pb2.LedgerPage.FromString(page).entries]
    entries = [entry for entry in entries if entry.client_id == client_id]
    assert len(entries) == len({entry.request_id for entry in entries})
    prompts, completions = [entry.prompt_tokens for entry in entries], [entry.completion_tokens for entry in entries]
    return [len(entries), sum(prompts), sum(completions)] == expected
