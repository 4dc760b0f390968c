"""Several models behind one router, as processes on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import httpx2 as httpx
import pytest

from midstream.config.models import write_models
from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import (
    kserve_pb2,
    kserve_pb2_grpc,
    openengine_pb2,
    openengine_pb2_grpc,
    service_pb2,
    service_pb2_grpc,
)
from tests.integration.named_processes import NamedProcesses
from tests.integration.service import START_TIMEOUT_S, Service, midstream
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub as KserveStub
    from protos.openengine_pb2_grpc import ControlAsyncStub as ControlStub
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

MODELS = ("large", "small")
HI = [{"role": "user", "content": "Hi"}]


class Models(NamedProcesses):
    """A router with two models, each with a scheduler, a fake worker and a detokenizer of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = open_model_folder("smollm2")
        self.commands: dict[str, str] = {}
        tables = {}
        self.grpc_port, self.http_port, *ports = free_ports(2 + 3 * len(MODELS))
        for index, name in enumerate(MODELS):
            scheduler, worker, detokenizer = ports[3 * index : 3 * index + 3]
            address = f"127.0.0.1:{scheduler}"
            self.commands |= {
                f"scheduler-{name}": f"scheduler --port {scheduler} --worker-port {worker} --journal-path "
                f"{folder / name} --served-model-name {name}",
                f"worker-{name}": f"tests.fakes.worker --scheduler tcp://127.0.0.1:{worker} --step-ms 10 "
                f"--model-fingerprint {model.fingerprint} --vocab-size {model.vocab_size}",
                f"detokenizer-{name}": f"detokenizer --port {detokenizer} --schedulers {address}",
            }
            tables[name] = {
                "model": "smollm2",
                "schedulers": address,
                "detokenizers": f"127.0.0.1:{detokenizer}",
                "model_aliases": f"{name}-latest",
            }
        write_models(folder / "models.toml", tables)
        self.commands["router"] = (
            f"router --port {self.grpc_port} --http-port {self.http_port} --models {folder / 'models.toml'} "
            "--unavailable-timeout-s 300"
        )
        self.url = f"http://127.0.0.1:{self.http_port}"

    def start(self, name: str) -> None:
        """Start or restart a process."""
        self.launch(name, *self.commands[name].split())

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON at a path."""
        found: dict[str, Any] = httpx.get(self.url + path, timeout=60).json()
        return found

    def wait_until_ready(self, *names: str) -> None:
        """Wait until requests to the models can run."""
        self.wait_until(lambda: all(self.get(f"/v1/models/{name}")["ready"] for name in names))

    def wait_until_running(self, num_streams: int) -> None:
        """Wait until the router has this number of streams."""
        shown = f"midstream:num_open_streams {float(num_streams)}"
        self.wait_until(lambda: shown in httpx.get(self.url + "/metrics").text)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds, while no process has ended by itself."""

        async def wait() -> None:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    for name, process in self.processes.items():
                        assert process.poll() is None, f"{name} has ended:\n{self.log(name)}"
                    try:
                        if is_so():
                            return
                    except httpx.TransportError:
                        pass
                    await asyncio.sleep(0.1)

        asyncio.run(wait())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    found = Models(tmp_path_factory.mktemp("models"))
    try:
        for name in found.commands:
            found.start(name)
        found.wait_until_ready(*MODELS)
        yield found
    finally:
        found.close()


def num_requests(models: Models) -> dict[str, int]:
    """Return the number of ended requests of each model, from the metrics."""
    found = dict.fromkeys(MODELS, 0)
    for line in httpx.get(models.url + "/metrics").text.splitlines():
        for name in MODELS:
            if line.startswith("midstream:request_success_total{") and f'model_name="{name}"' in line:
                found[name] += int(float(line.rpartition(" ")[2]))
    return found


def test_every_model_is_listed(models: Models) -> None:
    cards = models.get("/v1/models")["data"]
    assert [card["id"] for card in cards] == list(MODELS)
    assert [card["abilities"] for card in cards] == [["completions", "embeddings", "chat"]] * 2
    assert models.get("/v1/models/small-latest")["id"] == "small-latest"
    page = httpx.get(models.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [item["id"] for item in page["data"]] == list(MODELS)


@pytest.mark.parametrize("name", ["small", "small-latest", "large", None])
def test_the_model_of_a_request_chooses_in_every_api(models: Models, name: str | None) -> None:
    owner = (name or "large").removesuffix("-latest")
    before = num_requests(models)
    named = {} if name is None else {"model": name}
    calls: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, **named}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, **named}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, **named}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2, **named}),
        (f"/v2/models/{name or 'ensemble'}/generate", {"text_input": "Hi", "max_tokens": 2}),
    ]
    for path, body in calls:
        answer = httpx.post(models.url + path, json=body, headers={"anthropic-version": "2023-06-01"}, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
    assert len(asyncio.run(tokens_of(models, pb.GenerateRequest(model=name or "", prompt="Hi", max_tokens=2)))) == 2
    after = num_requests(models)
    assert {key: after[key] - before[key] for key in MODELS} == {
        key: len(calls) + 1 if key == owner else 0 for key in MODELS
    }


async def tokens_of(models: Models, request: pb.GenerateRequest | service_pb2.ResumeRequest) -> list[int]:
    """Return the tokens of a request over gRPC, each of which must come exactly once and in order."""
    async with open_channel(f"127.0.0.1:{models.grpc_port}") as channel:
        stub = cast("Stub", service_pb2_grpc.MidstreamStub(channel))
        call = stub.Generate(request) if isinstance(request, pb.GenerateRequest) else stub.Resume(request)
        found: list[int] = []
        async for chunk in call:
            assert chunk.is_keep_alive or chunk.token_offset == len(found)
            found += chunk.token_ids
        return found


def test_an_unknown_name_is_refused_with_the_names_that_exist(models: Models) -> None:
    known = "the models are 'large', 'large-latest', 'small', 'small-latest'"
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "Hi"}),
    ):
        answer = httpx.post(models.url + path, json={"model": "medium", **body}, timeout=60)
        assert (answer.status_code, known in answer.json()["error"]["message"]) == (404, True), answer.text
    answer = httpx.post(models.url + "/v2/models/medium/generate", json={"text_input": "Hi"}, timeout=60)
    assert (answer.status_code, known in answer.json()["error"]) == (404, True), answer.text
    with pytest.raises(grpc.aio.AioRpcError, match="the models are 'large'") as failure:
        asyncio.run(tokens_of(models, pb.GenerateRequest(model="medium", prompt="Hi")))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


def test_kserves_grpc_calls_choose_the_model(models: Models) -> None:
    async def ask() -> None:
        async with open_channel(f"127.0.0.1:{models.grpc_port}") as channel:
            stub = cast("KserveStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
            ready = [(await stub.ModelReady(kserve_pb2.ModelReadyRequest(name=name))).ready for name in ("small", "x")]
            assert ready == [True, False]
            statistics = await stub.ModelStatistics(kserve_pb2.ModelStatisticsRequest())
            assert [item.name for item in statistics.model_stats] == list(MODELS)
            control = cast("ControlStub", openengine_pb2_grpc.ControlStub(channel))
            info = await control.GetServerInfo(openengine_pb2.GetServerInfoRequest())
            assert list(info.supported_models) == list(MODELS)
            found = await control.GetModelInfo(openengine_pb2.GetModelInfoRequest(model="small-latest"))
            assert found.model_id == "small"

    asyncio.run(ask())


def test_a_header_chooses_the_model_of_calls_without_a_field_for_it(models: Models) -> None:
    assert httpx.post(models.url + "/pause?mode=keep", headers={"x-midstream-model": "small"}).status_code == 200
    paused = [
        httpx.get(models.url + "/is_paused", headers={"x-midstream-model": name}).json()["is_paused"] for name in MODELS
    ]
    httpx.post(models.url + "/resume", headers={"x-midstream-model": "small"})
    assert paused == [False, True]


def test_a_response_continues_one_of_another_model(models: Models) -> None:
    first = httpx.post(
        models.url + "/v1/responses", json={"model": "small", "input": "Hi", "max_output_tokens": 3}, timeout=60
    ).json()
    found = models.get(f"/v1/responses/{first['id']}")
    assert (found["model"], found["output"]) == ("small", first["output"])
    body = {"model": "large", "input": "More", "previous_response_id": first["id"], "max_output_tokens": 3}
    second = httpx.post(models.url + "/v1/responses", json=body, timeout=60).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]


def test_a_kill_of_one_models_scheduler_leaves_the_others_streams_alone(models: Models) -> None:
    async def run() -> None:
        def ask(model: str) -> asyncio.Task[list[int]]:
            request = pb.GenerateRequest(model=model, prompt="Hi", max_tokens=300, request_id=f"killed-{model}")
            request.stopping.ignore_eos = True
            return asyncio.create_task(tokens_of(models, request))

        large, small = ask("large"), ask("small")
        await asyncio.to_thread(models.wait_until_running, 2)
        await asyncio.to_thread(models.end, "scheduler-small")
        resumed = asyncio.create_task(tokens_of(models, service_pb2.ResumeRequest(request_id="killed-small")))
        assert len(await large) == 300
        assert len(await tokens_of(models, pb.GenerateRequest(prompt="Hi", max_tokens=2))) == 2
        assert (await asyncio.to_thread(httpx.get, models.url + "/health")).status_code == 200
        assert not small.done()
        models.start("scheduler-small")
        tokens = await small
        assert len(tokens) == 300
        assert await resumed == tokens

    asyncio.run(run())


def test_one_command_starts_several_models(tmp_path: Path) -> None:
    words = ("serve", "a=smollm2", "b=smollm2", "--detach", "--port", "0", "--http-port", "0")
    result = midstream(*words, "--run-dir", str(tmp_path), timeout=START_TIMEOUT_S, MIDSTREAM_MAX_KV_TOKENS="4096")
    assert result.returncode == 0, result.stdout + result.stderr
    service = Service(tmp_path)
    try:
        [router] = service.processes("router")
        url = f"http://{router['addresses']['http']}"
        for name in ("a", "b"):
            body = {"model": name, "prompt": "Hi", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
            assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
            assert (tmp_path / f"journal-{name}").is_dir()
        parts = {process["name"] for process in service.status_once_serving()["processes"]}
        assert parts == {
            "router-0", *(f"{kind}-0.{name}" for kind in ("scheduler", "worker", "detokenizer") for name in ("a", "b")),
        }  # fmt: skip
    finally:
        service.stop()
