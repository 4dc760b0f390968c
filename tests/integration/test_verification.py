"""A worker with a wrong weight in its memory is found, and delivers no token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.client import AsyncClient
from protos.status_pb2 import GetStatusRequest
from tests.gpu_worker.greedy import wrong_tokens
from tests.integration.service import Service, eventually, stub_of, tokens
from tests.integration.test_model_families import make_model

NUM_REQUESTS, MAX_TOKENS = 9, 12


@contextmanager
def wrong_worker(folder: Path, scheduler: dict[str, Any]) -> Iterator[None]:
    address = f"tcp://{scheduler['addresses']['zmq']}"
    command = [sys.executable, "-m", "tests.integration.wrong_worker", "--group-id", "wrong", "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--scheduler", address, "--model", str(folder), "--device", "cpu"], cwd=Path(__file__).parents[2]
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def metrics_of(part: dict[str, Any]) -> str:
    with urllib.request.urlopen(f"http://{part['addresses']['http']}/metrics", timeout=240) as answer:
        text: str = answer.read().decode()
    return text


async def test_a_wrong_worker_is_held_off_before_its_tokens_are_delivered(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_model(folder, "llama")
    prompts = [[3 + (7 * i + 11 * j) % 300 for j in range(20 + i)] for i in range(NUM_REQUESTS)]
    service = Service.start(tmp_path / "run", "--model", str(folder), "--workers", "2", MIDSTREAM_VERIFY="1")
    try:
        (scheduler,) = service.processes("scheduler")
        async with AsyncClient(service.routers()) as client, stub_of(service.routers()[0]) as stub:
            with wrong_worker(folder, scheduler):
                info = await eventually(client.server_info, lambda info: len(info.worker_groups) == 3, 60)
                assert len(info.worker_groups) == 3
                requests = [tokens(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
                answers = await asyncio.gather(*(client.stream(request).result() for request in requests))
                reasons = {group.group_id: group.held_off for group in (await client.server_info()).worker_groups}
                assert reasons.pop("wrong").startswith("wrong results: token")
                assert set(reasons.values()) == {""}
                async for status in stub.GetStatus(GetStatusRequest(), timeout=240):
                    details = {part.name: part.detail for part in status.parts}
                    assert details["wrong"].startswith("held off until its process restarts: wrong results: token")
                    break
        found = [answer.token_ids for answer in answers]
        assert [len(item) for item in found] == [MAX_TOKENS] * NUM_REQUESTS
        assert [wrong_tokens(model, *pair) for pair in zip(prompts, found, strict=True)] == [[]] * NUM_REQUESTS
        assert "midstream:num_wrong_workers_total 1.0" in await asyncio.to_thread(metrics_of, scheduler)
        log = await asyncio.to_thread(Path(scheduler["log"]).read_text, encoding="utf-8")
        assert "worker wrong is held off until its process restarts: wrong results" in log
    finally:
        service.stop()
