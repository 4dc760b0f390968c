"""Scheduler, detokenizer and router in one process, with a fake worker: kills, stops, failures and the log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.client import AsyncClient, SamplingParams
from tests.integration.parts import Parts, running
from tests.integration.service import Service

WAIT_S = 240
SHARING = ("scheduler-0", "detokenizer-0", "router-0")
NUM_TOKENS = 150
# Characters of several bytes, parts of which are tokens of their own, are among the text of these tokens.
FIRSTS = (300, 1000, 9000, 30_000)


class SharedParts(Parts):
    """The parts in one process, `services`, and the worker in another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, step_ms=5)
        commands = self._commands
        commands["scheduler"] += f" --journal-path {folder / 'journal'} --http-port 0"
        commands["detokenizer"] += " --http-port 0"
        sections = (f"{commands[kind]} --name {kind}-0" for kind in ("scheduler", "detokenizer", "router"))
        commands["services"] = "midstream.parts " + " + ".join(sections)

    @property
    def lines(self) -> list[dict[str, object]]:
        """The log of the shared process."""
        return [json.loads(line) for line in self.log("services").splitlines() if line.startswith("{")]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[SharedParts]:
    with running(SharedParts(tmp_path), "services", "worker") as parts:
        assert isinstance(parts, SharedParts)
        yield parts


class Streams:
    """Streams of all prompts, and the number of tokens that each has received."""

    def __init__(self, client: AsyncClient, num_tokens: int = NUM_TOKENS) -> None:
        self._num_tokens = num_tokens
        self._changed = asyncio.Event()
        self._counts = dict.fromkeys(FIRSTS, 0)
        self.tasks = [asyncio.create_task(self._read(client, first)) for first in FIRSTS]
        for task in self.tasks:
            task.add_done_callback(lambda _: self._changed.set())

    async def _read(self, client: AsyncClient, first: int) -> tuple[list[int], str]:
        token_ids, text = list[int](), ""
        sampling = SamplingParams(max_tokens=self._num_tokens, temperature=0, ignore_eos=True)
        async for chunk in client.generate(token_ids=[first], sampling=sampling):
            assert chunk.token_offset == len(token_ids)
            token_ids += chunk.token_ids
            text += chunk.text
            self._counts[first] = len(token_ids)
            self._changed.set()
        return token_ids, text

    async def reach(self, count: int) -> None:
        """Wait until every stream has received this number of tokens."""
        async with asyncio.timeout(WAIT_S):
            while min(self._counts.values()) < count:
                assert not any(task.done() and task.exception() for task in self.tasks)
                self._changed.clear()
                await self._changed.wait()

    async def results(self) -> list[tuple[list[int], str]]:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.gather(*self.tasks)


def address(parts: Parts) -> str:
    return f"127.0.0.1:{parts.router_port}"


async def test_streams_continue_with_the_same_bytes_after_kills_of_the_shared_process(parts: SharedParts) -> None:
    async with parts.stub(), AsyncClient([address(parts)], unavailable_timeout_s=WAIT_S) as client:
        expected = await Streams(client).results()
        assert [token_ids[0] for token_ids, _ in expected] == [first + 1 for first in FIRSTS]
        parts.hold.touch()  # no stream can end before the last kill
        streams = Streams(client)
        for count in (1, 20):
            await streams.reach(count)
            await asyncio.to_thread(parts.kill, "services")
            parts.start("services")
        await streams.reach(21)
        parts.hold.unlink()
        assert await streams.results() == expected


async def test_a_stop_lets_streams_end_and_parts_end_in_order(parts: SharedParts) -> None:
    async with parts.stub(), AsyncClient([address(parts)]) as client:
        parts.hold.touch()
        streams = Streams(client)
        await streams.reach(1)
        parts.send("services", signal.SIGINT)
        await asyncio.to_thread(parts.wait_for_log, "services", '"message": "draining"')
        assert [line["service"] for line in parts.lines if line["message"] == "draining"] == ["router-0"]
        parts.hold.unlink()
        assert {len(token_ids) for token_ids, _ in await streams.results()} == {NUM_TOKENS}
        assert await asyncio.to_thread(parts.processes["services"].wait, WAIT_S) == 0
    told = [(line["service"], line["message"]) for line in parts.lines if line["message"] in ("draining", "stopped")]
    assert told == [
        (f"{kind}-0", message) for kind in ("router", "detokenizer", "scheduler") for message in ("draining", "stopped")
    ]


async def test_a_second_signal_ends_streams_which_continue_at_the_next_start(parts: SharedParts) -> None:
    async with parts.stub(), AsyncClient([address(parts)], unavailable_timeout_s=WAIT_S) as client:
        parts.hold.touch()
        streams = Streams(client)
        await streams.reach(1)
        parts.send("services", signal.SIGINT)
        await asyncio.to_thread(parts.wait_for_log, "services", '"message": "draining"')
        parts.send("services", signal.SIGTERM)
        assert await asyncio.to_thread(parts.processes["services"].wait, WAIT_S) == 0
        parts.hold.unlink()
        parts.start("services")
        assert {len(token_ids) for token_ids, _ in await streams.results()} == {NUM_TOKENS}


async def test_the_supervisor_shows_each_part_of_a_shared_process_and_restarts_all_of_them(tmp_path: Path) -> None:
    service = Service.start(tmp_path, "--shared-process", "on")
    try:
        before = {process["name"]: process for process in service.status_once_serving()["processes"]}
        assert list(before) == ["scheduler-0", "worker-0", "detokenizer-0", "router-0"]
        (pid,) = {before[name]["pid"] for name in SHARING}
        assert before["worker-0"]["pid"] != pid
        async with AsyncClient(service.routers(), unavailable_timeout_s=WAIT_S) as client:
            sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
            expected = await client.generate("Once upon a time", sampling=sampling).result()
            text, was_killed = "", False
            async for chunk in client.generate("Once upon a time", sampling=sampling):
                text += chunk.text
                if not was_killed:
                    was_killed = True
                    os.kill(pid, signal.SIGKILL)
            assert text == expected.text
        after = {process["name"]: process for process in service.status_once_serving()["processes"]}
        assert {name: process["num_restarts"] for name, process in after.items()} == dict.fromkeys(SHARING, 1) | {
            "worker-0": 0
        }
        (new_pid,) = {after[name]["pid"] for name in SHARING}
        assert new_pid != pid
        assert {after[name]["health"] for name in after} == {"serving"}
    finally:
        service.stop()
    lines = (tmp_path / "logs" / "services-0.log").read_text(encoding="utf-8").splitlines()
    drained = [json.loads(line)["service"] for line in lines if '"draining"' in line]
    assert drained == ["router-0", "detokenizer-0", "scheduler-0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "router --port {port} --http-port 0 + detokenizer --port {port} --http-port 0",
            "detokenizer: cannot listen",
        ),
        ("router --http-port 0 + router --http-port 0", "router: name each of router, detokenizer, scheduler"),
        ("worker", "worker: name each of"),
        ("detokenizer --log-level debug + router", "must be the same for all parts"),
        ("scheduler --port x", "invalid int value"),
    ],
)
def test_a_wrong_setting_of_a_part_ends_the_process(tmp_path: Path, words: str, message: str) -> None:
    parts = SharedParts(tmp_path)
    process = parts.launch("services", "midstream.parts", *words.format(port=parts.router_port).split())
    try:
        assert process.wait(WAIT_S) == 2
    finally:
        parts.close()
    assert message in parts.log("services")
