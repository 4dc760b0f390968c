"""A backup of a running service, restored elsewhere, has every stored answer and continues running requests."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from midstream.client import AsyncClient, Chunk, SamplingParams
from tests.integration.service import Service, midstream

FLAGS = ("--served-model-name", "m")
# The request is still running when the backup is made and the service ends.
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = "Once upon a time"


def call(service: Service, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    url = f"http://{service.processes('router')[0]['addresses']['http']}{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=400) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.timeout(400)
async def test_a_backup_of_a_running_service_is_complete(tmp_path: Path) -> None:
    service = Service.start(tmp_path / "first", *FLAGS)
    copy = tmp_path / "backup"
    try:
        response = call(service, "/v1/responses", {"model": "m", "input": "Hi", "max_output_tokens": 12})
        chunks: list[Chunk] = []
        async with AsyncClient(service.routers()) as client:
            async for chunk in client.generate(PROMPT, sampling=LONG, request_id="long", detached=True):
                chunks.append(chunk)
                if len(chunks) == 20:
                    break
        done = midstream("backup", str(copy), "--run-dir", str(service.run_dir))
        assert done.returncode == 0, done.stderr
        async with AsyncClient(service.routers()) as client:
            assert (await client.loads())[0].num_running_requests == 1  # the backup was made while it ran
            rest = [chunk async for chunk in client.resume("long", from_token=0)]
        whole = [token for chunk in rest for token in chunk.token_ids]
        assert len(whole) == 200
    finally:
        service.stop()

    (tmp_path / "second").mkdir(mode=0o700)
    shutil.copytree(copy, tmp_path / "second", dirs_exist_ok=True)
    restored = Service.start(tmp_path / "second", *FLAGS)
    try:
        again = call(restored, f"/v1/responses/{response['id']}")
        assert again["output"] == response["output"]
        async with AsyncClient(restored.routers()) as client:
            continued = [chunk async for chunk in client.resume("long", from_token=0)]
        # On a CPU, the continuation has the same tokens as without the loss of the service.
        assert [token for chunk in continued for token in chunk.token_ids] == whole
    finally:
        restored.stop()


def test_a_backup_overwrites_nothing_and_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "journal").mkdir()
    taken = midstream("backup", str(tmp_path / "taken"), "--journal-path", str(tmp_path / "journal"))
    assert (taken.returncode, "exists; name a new folder" in taken.stderr) == (1, True)
    missing = midstream("backup", str(tmp_path / "new"), "--journal-path", str(tmp_path / "nowhere"))
    assert (missing.returncode, f"there is no journal at {tmp_path}/nowhere" in missing.stderr) == (1, True)
    assert not (tmp_path / "new").exists()
