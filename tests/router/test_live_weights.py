"""The routes that libraries for reinforcement learning call, and who may call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from protos import service_pb2_grpc, weights_pb2
from router.authentication import Authenticator, TokenFile
from router.pipeline.weights import WeightsAdmin
from router.protocols.live_weights import REFUSED
from tests.router.conftest import Cluster, Part


def client_of(router: Part, **options: Any) -> httpx2.AsyncClient:
    assert router.http is not None
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{router.http.port}", timeout=240, **options)


@pytest.fixture
def model_path(cluster: Cluster) -> str:
    return str(cluster.folder.path)


async def test_the_calls_of_a_rollout_in_the_order_of_sglang(cluster: Cluster, model_path: str) -> None:
    async with client_of(await cluster.add_router()) as client:
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "default"}
        paused = await client.post("/pause_generation", json={"mode": "retract", "future": 1})
        assert (paused.status_code, paused.headers["x-midstream-ignored"]) == (200, "future")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.get("/flush_cache")).status_code == 200
        fields = {"model_path": model_path, "weight_version": "7", "load_format": None, "token_step": 3}
        updated = await client.post("/update_weights_from_disk", json=fields)
        assert updated.json() == {
            "success": True,
            "message": "the weights have the version 7",
            "num_paused_requests": 2,
        }
        assert updated.headers["x-midstream-ignored"] == "token_step"
        assert (await client.post("/continue_generation", content=b"")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/get_weight_version")).json() == {"weight_version": "7"}
    modes = [call.mode for call in cluster.scheduler.weights_calls if hasattr(call, "mode")]
    assert modes == [weights_pb2.PAUSE_MODE_RECOMPUTE]


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", weights_pb2.PAUSE_MODE_ABORT),
        ("?mode=wait&clear_cache=true", weights_pb2.PAUSE_MODE_FINISH),
        ("?mode=keep", weights_pb2.PAUSE_MODE_KEEP),
    ],
)
async def test_vllm_gives_the_mode_in_the_query(
    cluster: Cluster, query: str, mode: weights_pb2.PauseMode.ValueType
) -> None:
    async with client_of(await cluster.add_router()) as client:
        assert (await client.post(f"/pause{query}")).json() == {"status": "paused"}
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert (await client.get("/weight_info")).json() == {"weight_version": "default"}
    assert cluster.scheduler.weights_calls[0].mode == mode


async def test_workers_sleep_and_wake_up_as_in_vllm(cluster: Cluster) -> None:
    async with client_of(await cluster.add_router()) as client:
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        for query in ("", "?level=2&mode=wait"):
            assert (await client.post(f"/sleep{query}")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        for query in ("", "?tags=weights", "?tags=weights&tags=kv_cache"):
            assert (await client.post(f"/wake_up{query}")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        for path in ("/sleep?level=0", "/sleep?level=x", "/sleep?mode=later", "/sleep?depth=1"):
            assert (await client.post(path)).status_code == 400, path
    first, second, *wakes = cluster.scheduler.weights_calls
    assert (first.level, first.mode) == (1, weights_pb2.PAUSE_MODE_KEEP)
    assert (second.level, second.mode) == (2, weights_pb2.PAUSE_MODE_FINISH)
    assert [[*wake.tags] for wake in wakes] == [[], ["weights"], ["weights", "kv_cache"]]


async def test_all_requests_are_aborted_without_ids(cluster: Cluster) -> None:
    async with client_of(await cluster.add_router()) as client:
        for path, body in (("/abort_requests", {}), ("/abort_request", {"abort_all": True})):
            cluster.scheduler.weights_calls.clear()
            assert (await client.post(path, json=body)).status_code == 200
            first, second = cluster.scheduler.weights_calls
            assert first.mode == weights_pb2.PAUSE_MODE_ABORT
            assert isinstance(second, weights_pb2.ResumeGenerationRequest)
        assert (await client.post("/abort_request", json={})).status_code == 400


async def test_a_failed_update_is_an_error_with_a_message(cluster: Cluster, model_path: str) -> None:
    async with client_of(await cluster.add_router()) as client:
        for fields, message in (
            ({}, "model_path: must be set"),
            ({"model_path": "relative"}, "model_path: must be an absolute path"),
            ({"model_path": "/etc"}, "--update-root"),
            ({"model_path": model_path, "load_format": "dummy"}, "load_format: must be"),
        ):
            answer = await client.post("/update_weights_from_disk", json=fields)
            assert (answer.status_code, answer.json()["success"]) == (400, False)
            assert message in answer.json()["message"]
    assert not cluster.scheduler.weights_calls


@pytest.mark.parametrize("path", REFUSED)
async def test_what_is_not_supported_is_refused_by_name(cluster: Cluster, path: str) -> None:
    async with client_of(await cluster.add_router()) as client:
        answer = await client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    assert path in answer.json()["error"]["message"]


async def test_cells_that_differ_are_reported(cluster: Cluster) -> None:
    cluster.scheduler.weights.problems.append("g: out of memory")
    cluster.scheduler.weights.num_groups = 0
    async with client_of(await cluster.add_router()) as client:
        answer = await client.get("/get_weight_version")
        assert answer.status_code == 503
        assert "out of memory" in answer.json()["error"]["message"]


async def test_only_administrators_may_change_weights(cluster: Cluster, model_path: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("token-of-a-user-here user\ntoken-of-an-admin-here boss admin\n")
    router = await cluster.add_router(authenticator=Authenticator(tokens=TokenFile(str(tokens))))
    for key, status in (("token-of-a-user-here", 403), ("token-of-an-admin-here", 200)):
        async with client_of(router, headers={"authorization": f"Bearer {key}"}) as client:
            for path in ("/pause", "/resume", "/sleep", "/wake_up"):
                assert (await client.post(path)).status_code == status
            assert (
                await client.post("/update_weights_from_disk", json={"model_path": model_path})
            ).status_code == status
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        metadata = (("authorization", "Bearer token-of-a-user-here"),)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.UpdateWeights(weights_pb2.UpdateWeightsRequest(path=model_path), metadata=metadata)
        assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
        cells = (await stub.GetWeightsVersion(weights_pb2.GetWeightsVersionRequest(), metadata=metadata)).cells
        assert [(cell.version.version, cell.version.path) for cell in cells] == [("root", "")]


@pytest.mark.parametrize(
    ("root", "path", "is_allowed"),
    [
        ("/weights", "/weights/step-1", True),
        ("/weights", "/weights/../etc", False),
        ("/weights", "/weightsy", False),
        ("", "/weights/step-1", False),
        ("", "/models/own", True),
        ("/weights", "/models/own/../own", True),
    ],
)
def test_a_path_must_be_below_the_folder_for_updates(root: str, path: str, is_allowed: bool) -> None:
    admin = WeightsAdmin(None, root, str(Path("/models/own")))  # type: ignore[arg-type]
    if is_allowed:
        admin._check_path(path)
    else:
        with pytest.raises(Exception, match="update"):
            admin._check_path(path)
