"""Authentication by token over gRPC and HTTP, with real servers and sockets in this process."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.config import RouterConfig
from midstream.errors import ConfigError, UnauthenticatedError
from midstream.rpc.channel import open_channel
from midstream.rpc.errors import error_from_rpc
from router.authentication import Authenticator, Caller, TokenFile
from router.permissions import DEFAULT_ROLES
from tests.faults.guarded_ports import ask, fetch, http_port, replace, serving, stream_of, who_am_i

ALICE, BOB = "alice-has-a-long-token", "bob-has-a-long-token-too"


def tokens_in(path: Path, *lines: str) -> TokenFile:
    path.write_text("\n".join(lines), encoding="utf-8")
    return TokenFile(str(path))


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["# nothing"],
        ["short me"],
        [ALICE],
        [f"{ALICE} alice and more"],
        [f"{ALICE} alice root"],
        [f"{ALICE} alice generate,"],
        [f"{ALICE} alice", f"{ALICE} bob"],
        [f"{ALICE} {'x' * 129}"],
    ],
)
def test_a_bad_token_file_refuses_to_start_and_shows_no_token(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        tokens_in(tmp_path / "tokens", *lines)
    assert raised.value.field == "auth_tokens"
    assert ALICE not in str(raised.value)


def test_authentication_that_contradicts_itself_refuses_to_start(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens_in(path, f"{ALICE} alice")
    for field, settings in (
        ("auth_tokens", {"auth": "token"}),
        ("auth_tokens", {"auth": "token", "auth_tokens": "/nowhere"}),
        ("auth_tokens", {"auth_tokens": str(path)}),
        ("auth", {"auth": "mtls"}),
        ("auth_roles", {"auth_roles": str(path)}),
        ("anonymous_roles", {"anonymous_roles": "root"}),
        ("anonymous_roles", {"auth": "token", "auth_tokens": str(path), "anonymous_roles": "generate"}),
    ):
        with pytest.raises(ConfigError) as raised:
            Authenticator.from_config(RouterConfig(**settings))  # type: ignore[arg-type]
        assert raised.value.field == field


async def test_tokens_over_grpc(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = tokens_in(path, "# who", f"{ALICE} alice", "", f"{BOB}  bob")
    async with serving(None, Authenticator(tokens=tokens)) as address:
        for token, client in ((ALICE, "alice"), (BOB, "bob")):
            async with open_channel(address, token=token) as channel:
                assert await ask(channel) == client
        for wrong in ("Bearer", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Basic {ALICE}", None):
            async with open_channel(address) as channel:
                metadata = (("authorization", wrong),) if wrong else ()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await who_am_i(channel)(b"", timeout=240, metadata=metadata)
                error = error_from_rpc(raised.value)
                assert isinstance(error, UnauthenticatedError)
                assert "authorization" in error.message or "token" in error.message
        async with open_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=240)).status == 1
            stream = stream_of(channel)(b"", timeout=240)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stream.read()
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_changed_token_file_is_read_again_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.authentication._LOOK_INTERVAL_S", 0.0)
    path = tmp_path / "tokens"
    tokens = tokens_in(path, f"{ALICE} alice")
    replace(path, f"{BOB} bob\n".encode())
    bob = Caller("bob", is_authenticated=True, roles=DEFAULT_ROLES)
    assert (tokens.caller_of(ALICE), tokens.caller_of(BOB)) == (None, bob)
    replace(path, b"")
    assert tokens.caller_of(BOB) == bob
    path.unlink()
    assert tokens.caller_of(BOB) == bob


def test_a_token_file_that_could_not_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.authentication._LOOK_INTERVAL_S", 0.0)
    path = tmp_path / "tokens"
    tokens = tokens_in(path, f"{ALICE} alice")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing(OSError(errno.EMFILE, "too many open files")))
        replace(path, f"{BOB} bob".encode())
        assert tokens.caller_of(ALICE)
    assert tokens.caller_of(ALICE) is None
    assert tokens.caller_of(BOB)


def failing(error: OSError) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


async def test_tokens_over_http(tmp_path: Path) -> None:
    tokens = tokens_in(tmp_path / "tokens", f"{ALICE} alice")
    async with http_port(Authenticator(tokens=tokens)) as port:
        url = f"http://127.0.0.1:{port}"
        assert await asyncio.to_thread(fetch, f"{url}/v1/models", Authorization=f"Bearer {ALICE}") == (200, "alice")
        status, body = await asyncio.to_thread(fetch, f"{url}/v1/models")
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
        status, _ = await asyncio.to_thread(fetch, f"{url}/v1/models", Authorization=f"Bearer {BOB}")
        assert status == 401
        status, _ = await asyncio.to_thread(fetch, f"{url}/health")
        assert status == 200
