"""`midstream serve`: flags known from other servers, and responses to a browser and to a load balancer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest

from midstream import __version__
from router.permissions import LIVE_WEIGHTS
from tests.integration.service import START_TIMEOUT_S, Service, midstream
from tests.ports import free_port

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
ROOT = Path(__file__).parents[2]
HI = [{"role": "user", "content": "Hi"}]
VOWELS = ["a", "e", "i", "o"]
KEY = "sk-integration-test-key"


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[Service]:
    run_dir = tmp_path_factory.mktemp("serve")
    flags = ["--detach", "--host", "0.0.0.0", "--port", str(ports[0]), "--http-port", str(ports[1])]
    flags += ["--served-model-name", "my-model", "--run-dir", str(run_dir)]
    variables = {"MIDSTREAM_ACCESS_LOG": "true", "MIDSTREAM_API_KEY": KEY}
    result = midstream("serve", "smollm2", *flags, timeout=START_TIMEOUT_S, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"midstream chat --run-dir {run_dir}" in result.stdout
    assert f"http://127.0.0.1:{ports[1]}/dashboard" in result.stdout
    service = Service(run_dir)
    yield service
    service.stop()


def get(port: int, path: str, key: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_only_routers_listen_beyond_the_loopback_address(served: Service, ports: tuple[int, int]) -> None:
    beyond = {
        connection.laddr.port
        for process in served.status()["processes"]
        for connection in psutil.Process(process["pid"]).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in LOOPBACK
    }
    assert beyond == set(ports)


def test_clients_need_the_key_and_find_the_name(served: Service, ports: tuple[int, int]) -> None:
    base = f"http://127.0.0.1:{ports[1]}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY) as client:
        assert [model.id for model in client.models.list()] == ["my-model"]
        answer = client.chat.completions.create(
            model="my-model",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
        assert "Paris" in str(answer.choices[0].message.content)
    with (
        openai.OpenAI(base_url=base, api_key="sk-another-key-that-is-wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    # Commands of the same user find the run folder and need no key.
    result = midstream("generate", "Hi", "--max-tokens", "1", "--run-dir", str(served.run_dir))
    assert result.returncode == 0, result.stderr
    assert KEY not in " ".join(" ".join(process.cmdline()) for process in psutil.Process(os.getpid()).parents())


def post(port: int, path: str, body: dict[str, Any]) -> tuple[Message, Any]:
    """Return the headers and the body of the answer."""
    headers = {
        "authorization": f"Bearer {KEY}",
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        return answer.headers, json.load(answer)


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/chat/completions", "max_completion_tokens", {"messages": HI, "stop": VOWELS}),
        ("/v1/chat/completions", "max_tokens", {"messages": HI, "stop": VOWELS}),
        ("/v1/completions", "max_tokens", {"prompt": "Hi", "stop": VOWELS}),
        ("/v1/messages", "max_tokens", {"messages": HI, "stop_sequences": VOWELS}),
        ("/v1/responses", "max_output_tokens", {"input": "Hi", "background": True}),
    ],
)
def test_a_limit_that_no_output_can_reach_is_listed_as_ignored(
    served: Service, ports: tuple[int, int], path: str, name: str, fields: dict[str, Any]
) -> None:
    def ignored(limit: int) -> str | None:
        body = {"model": "my-model", name: limit, **fields}
        headers, answered = post(ports[1], path, body)
        if path == "/v1/responses":
            post(ports[1], f"{path}/{answered['id']}/cancel", {})
        return headers.get("x-midstream-ignored")

    assert (ignored(8193), ignored(8192)) == (name, None)


def test_examples_and_commands_send_the_key_of_the_environment(served: Service, ports: tuple[int, int]) -> None:
    def run(*words: str, key: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"MIDSTREAM_API_KEY": key}
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    address = f"127.0.0.1:{ports[0]}"
    commands = (
        ("examples/streaming.py", address),
        ("-m", "midstream.cli", "generate", "--address", address, "--max-tokens", "1", "Hi"),
    )
    for words in commands:
        assert run(*words, key=KEY).returncode == 0
        refused = run(*words, key="")
        assert refused.returncode == 1
        assert "MIDSTREAM_API_KEY" in refused.stderr


def test_browsers_get_pages_and_monitoring_gets_a_version(served: Service, ports: tuple[int, int]) -> None:
    for path, words in (("/", "New conversation"), ("/docs", "Midstream API"), ("/dashboard", "Tokens per second")):
        status, text = get(ports[1], path)
        assert status == 200
        assert words in text
    for name in ("chat.js", "docs.js", "token.js", "pages.css", "vendor/marked.js", "vendor/dompurify.LICENSE"):
        assert get(ports[1], f"/static/{name}")[0] == 200
    assert get(ports[1], "/version")[0] == 401
    assert json.loads(get(ports[1], "/version", KEY)[1]) == {"version": __version__}


def test_every_example_of_the_reference_runs(served: Service, ports: tuple[int, int]) -> None:
    headers = {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}
    ids: dict[str, str] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[1]}", headers=headers, timeout=240) as client:
        paths = client.get("/openapi.json").json()["paths"]
        operations = [(method, path, operation) for path, of in paths.items() for method, operation in of.items()]
        # What is deleted or cancelled comes last, and the parts of a thing before the thing.
        operations.sort(
            key=lambda it: (it[0] == "delete", it[1].endswith("/cancel"), -it[1].count("/") * (it[0] == "delete"))
        )
        for method, path, operation in operations:
            required = [it for it in operation.get("parameters", ()) if it["in"] == "path"]
            values = {it["name"]: it.get("example") or ids[it["name"]] for it in required}
            ((kind, media),) = operation.get("requestBody", {"content": {"": {}}})["content"].items()
            body = media.get("example")
            if body and "input_file_id" in body:
                body = {**body, "input_file_id": ids["file_id"]}
            sent: dict[str, Any] = {"json": body} if body else {}
            if kind == "multipart/form-data":
                sent = {"data": {"purpose": body["purpose"]}, "files": {"file": ("requests.jsonl", body["file"])}}
            answer = client.request(method, path.format_map(values), **sent)
            if path.startswith(("/ledger", *LIVE_WEIGHTS)):
                expected = {403}  # this key is not an admin's
            elif path == "/classify":
                expected = {400}  # this model has no classes
            else:
                expected = {200, 400} if path.endswith("/cancel") else {200}  # what is to be cancelled may have ended
            assert answer.status_code in expected, (method, path, answer.text)
            if method == "post" and answer.status_code == 200 and not path.endswith("_stream"):
                made = answer.json()
                name = next((it for it in paths if it.startswith(path + "/{")), "").rpartition("{")[2].rstrip("}")
                found_id = made.get("id") or next((item.get("id") for item in made.get("data", ())), "")
                ids["receipt_id" if "choices" in made else name] = str(found_id)


def test_the_routers_log_has_a_line_for_each_request(served: Service) -> None:
    assert midstream("generate", "Hi", "--max-tokens", "3", "--run-dir", str(served.run_dir)).returncode == 0
    deadline = time.monotonic() + 240
    while not (ended := requests_with(served, 3)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ended[-1]["finish_reason"] == "length"
    assert ended[-1]["request_id"]


def requests_with(served: Service, num_output_tokens: int) -> list[dict[str, Any]]:
    """Return the log lines of requests with this number of output tokens, without one that is being written."""
    log = Path(served.processes("router")[0]["log"]).read_text()
    lines = [json.loads(line) for line in log.splitlines(keepends=True) if line.endswith("\n")]
    ended = [line for line in lines if line["message"].startswith("a request ended")]
    return [line for line in ended if line["num_output_tokens"] == num_output_tokens]


def test_a_second_service_on_the_same_port_is_refused_with_the_cure(
    tmp_path: Path, ports: tuple[int, int], served: Service
) -> None:
    result = midstream("up", "--detach", "--port", "0", "--http-port", str(ports[1]), "--run-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"midstream up: --http-port: port {ports[1]} on 127.0.0.1 is in use; ")
    assert "0: any free one" in result.stderr


def test_readiness_fails_if_the_only_worker_hangs(served: Service, ports: tuple[int, int]) -> None:
    assert get(ports[1], "/health")[0] == 200
    (worker,) = served.processes("gpu_worker")
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        health = wait_for_status(ports[1], 503)
        assert "no worker is connected" in health
        assert get(ports[1], "/live")[0] == 200
    finally:
        os.kill(worker["pid"], signal.SIGCONT)
    wait_for_status(ports[1], 200)


def wait_for_status(port: int, expected: int) -> str:
    deadline = time.monotonic() + 240
    while True:
        status, text = get(port, "/health")
        if status == expected:
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
