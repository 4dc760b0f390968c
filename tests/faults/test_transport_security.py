"""TLS over gRPC and HTTP, certificate rotation, and authentication by certificate, with real servers and sockets in
this process.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig
from midstream.errors import ConfigError, PermissionDeniedError
from midstream.rpc.channel import open_channel
from midstream.security.peer_names import PeerNames, admit_peers
from midstream.security.secure_channel import SecureChannel
from midstream.security.tls import Tls
from protos import frames_pb2, scheduler_pb2
from router.authentication import Authenticator
from scheduler.service import _admit
from tests.faults.certificates import Authority, Identity
from tests.faults.guarded_ports import ask, fetch, http_port, replace, serving, stream_of
from tests.integration.service import midstream

FRAMES = frames_pb2.DESCRIPTOR.services_by_name["Frames"]
SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]
REFUSED = r"certificate required|reset|EOF|closed"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


def tls_of(identity: Identity, authority: Authority, **options: bool) -> Tls:
    return Tls(identity.cert, identity.key, authority.ca, **options)


async def refusal(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(channel)
    return raised.value


async def test_a_server_with_tls_is_known_by_its_authority_and_name(authority: Authority, stranger: Authority) -> None:
    identity = authority.issue("server")
    async with serving(tls_of(identity, authority)) as address:
        async with open_channel(address, tls=Tls(ca=authority.ca)) as channel:
            assert (await ask(channel)) == ""
        async with open_channel(address, tls=Tls(ca=stranger.ca)) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address, tls=Tls(ca=authority.ca), server_name="another") as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_takes_only_clients_of_the_authority(authority: Authority, stranger: Authority) -> None:
    authenticator = Authenticator(by_certificate=True)
    tls = tls_of(authority.issue("server"), authority, require_client_cert=True)
    async with serving(tls, authenticator) as address:
        async with open_channel(address, tls=tls_of(authority.issue("carol"), authority)) as channel:
            assert await ask(channel) == "carol"
        async with open_channel(address, tls=tls_of(stranger.issue("carol"), authority)) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address, tls=Tls(ca=authority.ca)) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("part", ["router", "scheduler", "detokenizer", "worker"])
async def test_a_components_certificate_is_not_accepted_from_clients(authority: Authority, part: str) -> None:
    """The certificate is rejected over gRPC and HTTPS, whether it names the kind of component as a URI or as a DNS
    name.
    """
    authenticator, server = Authenticator(by_certificate=True), authority.issue("server")
    tls = tls_of(server, authority, require_client_cert=True)
    by_uri = authority.issue(f"{part} by uri", part=part)
    by_name = authority.issue(f"{part} by name", hosts=f"DNS:{part}")
    async with serving(tls, authenticator) as address, http_port(authenticator, tls) as port:
        for identity in (by_uri, by_name):
            async with open_channel(address, tls=tls_of(identity, authority)) as channel:
                error = await refusal(channel)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "service" in str(error.details())
            context = ssl.create_default_context(cafile=authority.ca)
            context.load_cert_chain(identity.cert, identity.key)
            status, _ = await asyncio.to_thread(fetch, f"https://127.0.0.1:{port}/v1/models", context)
            assert status == 401


async def test_replaced_certificates_are_in_use_without_a_restart(tmp_path: Path, authority: Authority) -> None:
    """Both sides switch to another authority, and a running stream continues."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(source: Authority, name: str, *trusted: Authority) -> None:
        identity = source.issue(name, hosts="DNS:server.test")
        replace(folder / f"{name}.key", contents(identity.key))
        replace(folder / f"{name}.pem", contents(identity.cert))
        replace(folder / f"{name}.ca", b"".join(contents(authority.ca) for authority in trusted))

    def mounted(name: str) -> Tls:
        cert, key, ca = (str(folder / f"{name}.{kind}") for kind in ("pem", "key", "ca"))
        return Tls(cert, key, ca, require_client_cert=True)

    mount(old, "server", old)
    mount(old, "client", old)
    async with serving(mounted("server"), Authenticator(by_certificate=True)) as address:
        channel = open_channel(address, tls=mounted("client"), server_name="server.test")
        running = stream_of(channel)(b"")
        assert await running.read() == b"client"
        # First, both sides trust both authorities. Then the certificates change, and finally the old authority is
        # removed.
        for step in ((old, old, new), (new, old, new), (new, new)):
            mount(step[0], "server", *step[1:])
            mount(step[0], "client", *step[1:])
        async with open_channel(address, tls=mounted("client"), server_name="server.test") as fresh:
            assert await ask(fresh) == "client"
        late = Tls(str(folder / "client.pem"), str(folder / "client.key"), old.ca)
        async with open_channel(address, tls=late, server_name="server.test") as stale:
            assert (await refusal(stale)).code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(channel, SecureChannel)
        async with asyncio.timeout(240):
            # The open channel checks its files once a second.
            while channel.num_rotations == 0:
                assert await ask(channel) == "client"
        assert await ask(channel) == "client"
        assert not running.done()
        running.cancel()
        await channel.close()


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def test_half_replaced_files_leave_the_old_certificate_in_use(tmp_path: Path, authority: Authority) -> None:
    first = authority.issue("rotating")
    paths = [tmp_path / "cert", tmp_path / "key"]
    for path, source in zip(paths, (first.cert, first.key), strict=True):
        path.write_bytes(contents(source))
    tls = Tls(str(paths[0]), str(paths[1]), authority.ca)
    version = tls.refresh()
    second = authority.issue("rotating")
    replace(paths[0], contents(second.cert))
    assert tls.refresh() == version, "the key is still the old key"
    replace(paths[1], b"")
    assert tls.refresh() == version
    paths[1].unlink()
    assert tls.refresh() == version
    replace(paths[1], contents(second.key))
    assert tls.refresh() == version + 1


def test_files_that_could_not_be_read_for_a_moment_are_read_again(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = authority.issue("unreadable")
    paths = [tmp_path / "cert", tmp_path / "key"]
    for path, source in zip(paths, (identity.cert, identity.key), strict=True):
        path.write_bytes(contents(source))
    tls = Tls(str(paths[0]), str(paths[1]), authority.ca)
    version = tls.refresh()
    replace(paths[1], contents(identity.key))

    def fail(path: Path) -> bytes:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert tls.refresh() == version
    assert tls.refresh() == version + 1


@pytest.mark.parametrize("config_class", [RouterConfig, SchedulerConfig, DetokenizerConfig])
def test_contradictions_and_bad_files_refuse_to_start(
    tmp_path: Path, authority: Authority, config_class: type[RouterConfig | SchedulerConfig | DetokenizerConfig]
) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    empty = tmp_path / "empty.pem"
    empty.touch()
    cert, key, ca = good.cert, good.key, authority.ca
    cases: list[tuple[str, dict[str, Any]]] = [
        ("tls_cert", {"tls": True}),
        ("tls_cert", {"tls": True, "tls_cert": "", "tls_key": key, "tls_ca": ca}),
        ("tls_key", {"tls": True, "tls_cert": cert, "tls_ca": ca}),
        ("tls_ca", {"tls": True, "tls_cert": cert, "tls_key": key, "tls_require_client_cert": True}),
        ("tls_cert", {"tls": True, "tls_cert": "/nowhere/cert", "tls_key": key, "tls_ca": ca}),
        ("tls_key", {"tls": True, "tls_cert": cert, "tls_key": str(empty), "tls_ca": ca}),
        ("tls_cert", {"tls": True, "tls_cert": cert, "tls_key": other.key, "tls_ca": ca}),
        ("tls_ca", {"tls": True, "tls_cert": cert, "tls_key": key, "tls_ca": key}),
        ("tls_cert", {"tls_cert": cert}),
        ("tls_ca", {"tls_ca": ca}),
    ]
    for field, settings in cases:
        with pytest.raises(ConfigError) as raised:
            Tls.from_config(config_class(**settings))
        assert raised.value.field == field, settings
    assert Tls.from_config(config_class()) is None
    assert Tls.from_config(config_class(tls=True, tls_cert=cert, tls_key=key, tls_ca=ca)) is not None
    assert config_class().host == "127.0.0.1"


async def test_https_with_client_certificates_and_their_rotation(authority: Authority, tmp_path: Path) -> None:
    identity = authority.issue("router")
    paths = [tmp_path / "cert", tmp_path / "key"]
    for path, source in zip(paths, (identity.cert, identity.key), strict=True):
        path.write_bytes(contents(source))
    tls = Tls(str(paths[0]), str(paths[1]), authority.ca, require_client_cert=True)
    async with http_port(Authenticator(by_certificate=True), tls) as port:
        url = f"https://127.0.0.1:{port}"
        context = ssl.create_default_context(cafile=authority.ca)
        for page in ("/v1/models", "/health"):
            with pytest.raises(OSError, match=REFUSED):
                await asyncio.to_thread(fetch, f"{url}{page}", context)
        dora = authority.issue("dora")
        context.load_cert_chain(dora.cert, dora.key)
        assert await asyncio.to_thread(fetch, f"{url}/v1/models", context) == (200, "dora")
        before = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        renewed = authority.issue("router")
        replace(paths[1], contents(renewed.key))
        replace(paths[0], contents(renewed.cert))
        async with asyncio.timeout(240):
            while await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await asyncio.to_thread(fetch, f"{url}/v1/models", context) == (200, "dora")


@pytest.mark.parametrize("port", ["https", "grpc"])
async def test_a_removed_authority_is_no_longer_trusted(
    tmp_path: Path, authority: Authority, stranger: Authority, port: str
) -> None:
    identity, old, new = authority.issue("router"), stranger.issue("old"), authority.issue("new")
    ca = tmp_path / "ca"
    ca.write_bytes(contents(authority.ca) + contents(stranger.ca))
    tls = Tls(identity.cert, identity.key, str(ca), require_client_cert=True)
    authenticator = Authenticator(by_certificate=True)
    if port == "https":
        async with http_port(authenticator, tls) as number:
            contexts = []
            for client in (old, new):
                context = ssl.create_default_context(cafile=authority.ca)
                context.load_cert_chain(client.cert, client.key)
                contexts.append(context)
            url = f"https://127.0.0.1:{number}/v1/models"
            assert await asyncio.to_thread(fetch, url, contexts[0]) == (200, "old")
            replace(ca, contents(authority.ca))
            tls.refresh()
            with pytest.raises(OSError, match=rf"{REFUSED}|unknown ca"):
                await asyncio.to_thread(fetch, url, contexts[0])
            assert await asyncio.to_thread(fetch, url, contexts[1]) == (200, "new")
        return
    async with serving(tls, authenticator) as address:
        async with open_channel(address, tls=Tls(old.cert, old.key, authority.ca)) as channel:
            assert await ask(channel) == "old"
        replace(ca, contents(authority.ca))
        async with open_channel(address, tls=Tls(old.cert, old.key, authority.ca)) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address, tls=Tls(new.cert, new.key, authority.ca)) as channel:
            assert await ask(channel) == "new"


async def test_https_requires_a_certificate_even_for_anonymous_callers(authority: Authority) -> None:
    identity, dora = authority.issue("router"), authority.issue("dora")
    tls = Tls(identity.cert, identity.key, authority.ca, require_client_cert=True)
    async with http_port(Authenticator(), tls) as port:
        url = f"https://127.0.0.1:{port}/v1/models"
        context = ssl.create_default_context(cafile=authority.ca)
        with pytest.raises(OSError, match=REFUSED):
            await asyncio.to_thread(fetch, url, context)
        context.load_cert_chain(dora.cert, dora.key)
        assert await asyncio.to_thread(fetch, url, context) == (200, "127.0.0.1")


@pytest.mark.parametrize(
    ("names", "is_router"),
    [
        ("URI:spiffe://midstream/router", True),
        ("URI:spiffe://cluster.local/ns/midstream/router", True),
        ("DNS:router", True),
        ("DNS:gateway.example", True),  # the whole message
        ("URI:spiffe://midstream/router/client", False),
        ("URI:https://midstream/router", False),
        ("DNS:router.example,DNS:client", False),
        ("email:router", False),
        ("URI:spiffe://midstream/detokenizer", False),
    ],
)
async def test_an_internal_port_accepts_the_configured_components(
    authority: Authority, names: str, is_router: bool
) -> None:
    # The common name is the client's own choice, so it proves nothing.
    server, caller = authority.issue("scheduler"), authority.issue("router", hosts=names)
    config = SchedulerConfig(tls=True, tls_cert=server.cert, tls_key=server.key, tls_ca=authority.ca)
    peers = PeerNames("router, gateway.example", "router_names")
    shown = Tls(caller.cert, caller.key, authority.ca)
    async with (
        serving(Tls.from_config(config), admit=admit_peers(config, lambda _: peers)) as address,
        open_channel(address, tls=shown) as channel,
    ):
        if is_router:
            await ask(channel)
        else:
            assert (await refusal(channel)).code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("method", [method.full_name for method in (*SCHEDULER.methods, *FRAMES.methods)])
@pytest.mark.parametrize("kind", ["router", "detokenizer", "scheduler", "worker"])
def test_each_method_of_a_scheduler_is_for_the_components_that_need_it(method: str, kind: str) -> None:
    admit = _admit(SchedulerConfig(tls=True, tls_cert="c", tls_key="k", tls_ca="a", tls_require_client_cert=True))
    assert admit is not None
    context: Any = SimpleNamespace(auth_context=lambda: {"peer_uri": [f"spiffe://midstream/{kind}".encode()]})
    both = {"router", "detokenizer"}
    needed = {"OpenTokenFeed": {"detokenizer"}, "GetLoads": both, "Tunnel": both}
    service, _, name = method.rpartition(".")
    if kind in needed.get(name, {"router"}):
        admit(f"/{service}/{name}", context)
    else:
        with pytest.raises(PermissionDeniedError):
            admit(f"/{service}/{name}", context)


def test_the_keys_of_the_command_are_private(tmp_path: Path) -> None:
    made = midstream("certificates", "alice", "--output", str(tmp_path))
    assert made.returncode == 0, made.stderr
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.key")} == {0}


async def test_the_command_creates_certificates_for_components_and_clients(tmp_path: Path) -> None:
    made = midstream("certificates", "scheduler", "router", "alice", "--output", str(tmp_path))
    assert made.returncode == 0, made.stderr
    ca = str(tmp_path / "ca.pem")
    config = SchedulerConfig(
        tls=True, tls_cert=str(tmp_path / "scheduler.pem"), tls_key=str(tmp_path / "scheduler.key"), tls_ca=ca
    )
    routers = PeerNames(config.router_names, "router_names")
    async with serving(Tls.from_config(config), admit=admit_peers(config, lambda _: routers)) as address:
        router, alice = (
            Tls(str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key"), ca) for name in ("router", "alice")
        )
        async with open_channel(address, tls=router) as channel:
            await ask(channel)
        async with open_channel(address, tls=alice) as channel:
            assert (await refusal(channel)).code() is grpc.StatusCode.PERMISSION_DENIED
