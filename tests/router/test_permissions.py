"""Which callers may call which methods, on every API of a router."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from midstream.client import AsyncClient
from midstream.config import RouterConfig
from midstream.errors import InvalidArgumentError, PermissionDeniedError
from midstream.rpc.channel import open_channel
from midstream.security.peer_names import PeerCertificate
from protos import generation_pb2 as pb
from protos import kserve_pb2, loads_pb2, openengine_pb2, service_pb2
from router.authentication import Authenticator, Caller, RoleFile, TokenFile, current_caller
from router.permissions import _GRPC, _HTTP, ALL_ROLES, DEFAULT_ROLES, Role, roles_for_method, roles_for_path
from router.pipeline.request_checks import check_adapter_path
from tests.router.conftest import Cluster

TOKENS = {
    Role.GENERATE: "token-that-generates",
    Role.OBSERVE: "token-that-observes",
    Role.ADMIN: "token-of-an-admin-here",
}
DENIED = grpc.StatusCode.PERMISSION_DENIED


def authenticator(folder: Path) -> Authenticator:
    file = folder / "tokens"
    file.write_text("".join(f"{token} {role}-client {role}\n" for role, token in TOKENS.items()))
    return Authenticator(tokens=TokenFile(str(file)))


def methods() -> Iterator[tuple[str, bool, bool]]:
    """Yield the name of each method that clients can call, and whether it streams requests and responses."""
    for module in (service_pb2, kserve_pb2, openengine_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming


def test_every_method_has_its_roles() -> None:
    assert {name for name, _, _ in methods()} == {name for name in _GRPC if not name.startswith("/grpc.")}
    assert roles_for_method("/midstream.v1.Midstream/New") == roles_for_path("/new") == {Role.ADMIN}


def test_contents_and_adapters_are_for_admins_and_loads_for_observers() -> None:
    def only(role: Role) -> set[str]:
        return {name.rpartition("/")[2] for name, roles in _GRPC.items() if roles == {role}}

    weights = {"UpdateWeights", "PauseGeneration", "ResumeGeneration", "Sleep", "WakeUp"}
    assert only(Role.ADMIN) == {"LoadLora", "UnloadLora", "SubscribeKvEvents", "GetKvEventSources"} | weights
    loads = {"GetServerInfo", "GetLoads", "GetIterationStats", "GetStatus", "GetLoad", "ModelStatistics"}
    assert only(Role.OBSERVE) == loads
    assert roles_for_path("/ledger") == {Role.ADMIN}
    assert roles_for_path("/v1/files/x") == {Role.GENERATE}
    assert roles_for_path("/metrics") == roles_for_path("/dashboard/feed") == {Role.OBSERVE}


async def call(address: str, token: str, method: tuple[str, bool, bool], timeout_s: float) -> grpc.StatusCode:
    """Call a method with an empty message; return the status, which is OK for a stream once a message arrives."""
    name, _, streams = method
    async with open_channel(address, token=token) as opened:
        channel: Any = opened
        # An empty message is valid for any type, and a single request is a valid request stream.
        try:
            if streams:
                await channel.unary_stream(name)(b"", timeout=timeout_s).read()
            else:
                await channel.unary_unary(name)(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_each_role_reaches_its_methods_and_no_others(cluster: Cluster, tmp_path: Path) -> None:
    part = await cluster.add_router(await cluster.add_detokenizer(), authenticator=authenticator(tmp_path))
    for role, token in TOKENS.items():
        expected = {name for name, _, _ in methods() if role in _GRPC[name] or role is Role.ADMIN}
        # A denied call gets a long timeout, since its status must arrive; a permitted method may send nothing, so its
        # timeout is short.
        calls = (call(part.address, token, method, 1 if method[0] in expected else 60) for method in methods())
        statuses = await asyncio.gather(*calls)
        reached = {name for (name, _, _), status in zip(methods(), statuses, strict=True) if status is not DENIED}
        assert reached == expected, role
    assert part.http is not None
    assert isinstance(part.pages, Starlette)
    routes = [route for route in part.pages.routes if isinstance(route, Route) and "static" not in route.path]
    for role, token in TOKENS.items():
        for route in routes:
            method = "POST" if route.methods and "POST" in route.methods else "GET"
            status = await asyncio.to_thread(http_status, part.http.port, method, route.path, token)
            is_open = route.path in (
                "/health",
                "/live",
                "/v2/health/live",
                "/v2/health/ready",
                "/dashboard",
                "/",
                "/docs",
            )
            may = is_open or role is Role.ADMIN or role in roles_for_path(route.path)
            assert (status == 403) is not may, (role, route.path, status)
            # Every path must be listed. A path that is not listed requires the role admin, so a new path cannot be left
            # open by mistake.
            assert is_open or any(route.path.startswith(prefix) for prefix, _ in _HTTP)


def http_status(port: int, method: str, path: str, token: str) -> int:
    data = b"{}" if method == "POST" else None
    headers = {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=240) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_monitoring_without_credentials_sees_metrics_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKENS[Role.GENERATE]} client\n")
    anonymous = Authenticator(tokens=TokenFile(str(tokens)), anonymous_roles=frozenset({Role.OBSERVE}))
    part = await cluster.add_router(await cluster.add_detokenizer(), authenticator=anonymous)
    assert part.http is not None
    statuses = {}
    for path in ("/metrics", "/v1/models", "/v1/completions"):
        request = urllib.request.Request(f"http://127.0.0.1:{part.http.port}{path}")
        try:
            with await asyncio.to_thread(urllib.request.urlopen, request, timeout=240) as response:
                statuses[path] = response.status
        except urllib.error.HTTPError as error:
            statuses[path] = error.code
            error.close()
    assert statuses == {"/metrics": 200, "/v1/models": 200, "/v1/completions": 401}


async def test_only_an_admin_sees_paths_of_adapters_and_loads_by_path(cluster: Cluster, tmp_path: Path) -> None:
    part = await cluster.add_router(await cluster.add_detokenizer(), authenticator=authenticator(tmp_path))
    by_path = pb.GenerateRequest(prompt="a", lora=pb.LoraConfig(name="x", path="/nowhere"))
    async with AsyncClient(part.address, token=TOKENS[Role.GENERATE]) as client:
        for action in (client.load_lora("x", "/nowhere"), client.unload_lora("x"), client.stream(by_path).result()):
            with pytest.raises(PermissionDeniedError, match="admin"):
                await action
    cluster.scheduler.loras = [loads_pb2.LoraInfo(name="x", path="/adapters/x")]
    for role, path in ((Role.GENERATE, ""), (Role.ADMIN, "/adapters/x")):
        async with AsyncClient(part.address, token=TOKENS[role]) as client:
            assert [(lora.name, lora.path) for lora in await client.loras()] == [("x", path)]


@pytest.mark.parametrize(
    ("path", "root", "reason"),
    [
        ("/adapters/a", "/adapters", ""),
        ("/adapters/a/../b", "/adapters/", ""),
        ("/adapters/../etc", "/adapters", "outside"),
        ("/adapters-of-others/a", "/adapters", "outside"),
        ("a", "/adapters", "outside"),
        ("/adapters/a\0", "/adapters", "outside"),
        ("/adapters/a", "", r"set MIDSTREAM_ADAPTER_ROOT \(--adapter-root\)"),
        ("a", "", r"set MIDSTREAM_ADAPTER_ROOT \(--adapter-root\)"),
    ],
)
def test_adapters_are_loaded_only_from_below_the_adapter_root(path: str, root: str, reason: str) -> None:
    if not reason:
        check_adapter_path(path, root, "path")
        return
    with pytest.raises(InvalidArgumentError, match=reason):
        check_adapter_path(path, root, "path")


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, ALL_ROLES),
        ({"host": "::1"}, ALL_ROLES),
        ({"host": "0.0.0.0"}, DEFAULT_ROLES),
        ({"host": "0.0.0.0", "anonymous_roles": "admin"}, ALL_ROLES),
        ({"anonymous_roles": "generate"}, {Role.GENERATE}),
    ],
)
def test_callers_are_admins_without_authentication_only_on_loopback_addresses(
    settings: dict[str, Any], roles: frozenset[Role]
) -> None:
    known = Authenticator.from_config(RouterConfig(**settings))
    assert known.identify("", PeerCertificate(), "10.0.0.1", ALL_ROLES).roles == roles


def test_request_ids_and_salts_of_clients_are_separate() -> None:
    alice, bob = (Caller(name, is_authenticated=True, roles=DEFAULT_ROLES) for name in ("alice", "bob"))
    root = Caller("root", is_authenticated=True, roles=ALL_ROLES)
    inner = alice.scope("id")
    assert len({inner, bob.scope("id"), bob.scope(inner), root.scope("id")}) == 4
    assert root.scope(inner) == inner  # an admin may access other callers' requests
    assert len({alice.salt(""), bob.salt(""), bob.salt(alice.salt("")), alice.salt("own")}) == 4
    assert Caller("127.0.0.1").salt("shared") == "shared"
    first, second = (Caller(name, roles=DEFAULT_ROLES) for name in ("10.0.0.1", "10.0.0.2"))  # without credentials
    assert first.scope("id") == "id"
    assert first.scope(inner) == second.scope(inner) != inner
    assert first.salt(alice.salt("")) == second.salt(alice.salt("")) != alice.salt("")


async def test_the_cache_salt_is_the_clients_unless_prefixes_are_shared(cluster: Cluster) -> None:
    await cluster.add_router(await cluster.add_detokenizer())
    runner = cluster.runners[0]
    salts = []
    for name in ("alice", "bob"):
        current_caller.set(Caller(name, is_authenticated=True, roles=DEFAULT_ROLES))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1]), cache_salt="s")
        await runner._normalize(request)
        salts.append(request.cache_salt)
    assert len({*salts, "s"}) == 3
    runner._config = replace(runner._config, share_prefix_cache=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1]), cache_salt="s")
    await runner._normalize(request)
    assert request.cache_salt == "s"


def test_roles_of_certificates_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "roles").write_text("# who\nops admin\nmonitor observe\n")
    known = Authenticator(by_certificate=True, roles=RoleFile(str(tmp_path / "roles")))
    for name, roles in (("ops", ALL_ROLES), ("monitor", {Role.OBSERVE}), ("alice", DEFAULT_ROLES)):
        assert known.identify("", PeerCertificate((name,)), "address", ALL_ROLES).roles == roles
    with pytest.raises(PermissionDeniedError):
        known.identify("", PeerCertificate(("monitor",)), "address", frozenset({Role.GENERATE}))
