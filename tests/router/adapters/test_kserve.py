"""The official Triton client, with a router on a real socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import sys

from midstream.model.tokenizer import Tokenizer
from tests.router.conftest import Cluster

TEXT = "Every part may die 🫠 and the text goes on."


async def test_the_official_client(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """The response to every request is TEXT, in two pieces."""
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode(TEXT)
    answered: set[str] = set()

    async def answer() -> None:
        while True:
            await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
            for request_id in set(cluster.scheduler.requests) - answered:
                answered.add(request_id)
                cluster.scheduler.emit(request_id, ids[:5])
                cluster.scheduler.emit(request_id, ids[5:])
                cluster.scheduler.end(request_id)

    command = [sys.executable, "-m", "tests.router.adapters.triton_client", router.address]
    client = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    answering = asyncio.create_task(answer())
    output, errors = await client.communicate()
    answering.cancel()
    assert client.returncode == 0, errors.decode()
    report = json.loads(output)
    assert report["live"]
    assert report["ready"]
    assert not report["unknown_ready"]
    assert report["name"] == "midstream"
    assert {"text_input", "max_tokens", "beam_width", "lora_task_id"} <= set(report["inputs"])
    assert report["decoupled"]
    assert report["whole"] == [[TEXT], "7", [0]]
    assert report["batch"] == [[TEXT, TEXT], [0, 1]]
    assert report["streamed"] == TEXT
    assert "temperature" in report["stream_error"]
    assert report["unknown_model"].startswith("StatusCode.NOT_FOUND")
    assert "colour" in report["unknown_input"]
    assert "'priority' is not supported" in report["priority"]
    assert "text_input" in report["no_text"]
    assert report["counts"] == [3, 5]
    natives = [request.request for request in cluster.scheduler.requests.values()]
    assert sorted(native.streaming for native in natives) == [False, False, False, True]
    assert {native.max_tokens for native in natives} == {16}
    assert [list(native.stopping.stop_words) for native in natives].count(["never"]) == 2
