"""The service with all security features and a small real model: TLS with client certificates, CURVE keys, and callers
that are authenticated by token or by certificate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from midstream.client import AsyncClient
from midstream.security.tls import Tls
from tests.faults.certificates import Authority, Identity
from tests.faults.small_model import make_small_model
from tests.integration.named_processes import NamedProcesses
from tests.integration.service import midstream
from tests.ports import free_ports

ALICE = "alice-has-a-long-token"
BOB = "bob-has-a-long-token-too"
ROOT = "root-is-the-administrator"


class Guarded(NamedProcesses):
    """The running processes: scheduler, worker, detokenizer, a router that authenticates by token, and one by
    certificate.

    Attributes:
        authority: Signer of all certificates.
        ports: Ports by component; `worker` is the scheduler's port for workers, `http` the first router's HTTP port.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.authority = Authority(folder / "authority")
        names = ("scheduler", "worker", "detokenizer", "token", "certificate", "http")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        (folder / "model").mkdir()
        self._model = str(make_small_model(folder / "model", max_position_embeddings=8192).path)
        self._allowed = folder / "allowed"
        for name in ("scheduler", "worker"):
            result = midstream("keys", name, "--output", str(folder))
            assert result.returncode == 0, result.stderr
        self._allowed.mkdir()
        (folder / "worker.key").rename(self._allowed / "worker.key")
        tokens = f"{ALICE} alice\n{BOB} bob\n{ROOT} root admin\n"
        (folder / "tokens").write_text(tokens, encoding="utf-8")

    def _command(self, name: str) -> list[str]:
        folder, ports = self.folder, self.ports
        curve = ["--curve", "--curve-secret-key", str(folder / f"{name}.key_secret")]
        if name == "worker":
            server = ["--curve-server-key", str(folder / "scheduler.key"), "--num-threads", "1"]
            return ["gpu_worker", "--scheduler", f"tcp://127.0.0.1:{ports['worker']}", *curve, *server]
        tls = [
            "--tls",
            *_flags(self.authority.issue(name, part=name if name in ("scheduler", "detokenizer") else "router")),
            "--tls-ca",
            self.authority.ca,
        ]
        own = ["--port", str(ports[name]), *tls]
        schedulers = ["--schedulers", f"127.0.0.1:{ports['scheduler']}"]
        if name == "scheduler":
            workers = ["--worker-port", str(ports["worker"]), "--curve-worker-keys", str(self._allowed)]
            return ["scheduler", *own, *workers, *curve, "--journal-path", str(folder / "journal")]
        if name == "detokenizer":
            return ["detokenizer", *own, *schedulers]
        http = ["--http-port", str(ports["http"] if name == "token" else 0)]
        auth = ["--auth", "token", "--auth-tokens", str(folder / "tokens")]
        if name == "certificate":
            auth = ["--auth", "mtls", "--tls-require-client-cert"]
        return ["router", *own, *schedulers, "--detokenizers", f"127.0.0.1:{ports['detokenizer']}", *http, *auth]

    def start(self, *names: str) -> None:
        """Start processes by name."""
        for name in names:
            self.launch(name, *self._command(name), "--model", self._model, "--log-level", "debug")

    def kill(self, name: str) -> None:
        self.end(name)

    def client(self, router: str = "token", *, tls: Tls | None = None, token: str = "") -> AsyncClient:
        """Return a client of a router."""
        return AsyncClient(f"127.0.0.1:{self.ports[router]}", tls=tls, token=token)

    def alice(self) -> AsyncClient:
        """Return a client that authenticates with a token."""
        return self.client(tls=Tls(ca=self.authority.ca), token=ALICE)

    def carol(self) -> AsyncClient:
        """Return a client that authenticates with a certificate."""
        carol = self.authority.issue("carol")
        return self.client("certificate", tls=Tls(carol.cert, carol.key, self.authority.ca))

    async def is_whole(self) -> bool:
        """Return whether both routers see a worker and a detokenizer; raise a MidstreamError if a router does not
        answer.
        """
        async with self.alice() as alice, self.carol() as carol:
            infos = [await client.server_info() for client in (alice, carol)]
        return all(info.worker_groups and info.detokenizers for info in infos)


def _flags(identity: Identity) -> list[str]:
    return ["--tls-cert", identity.cert, "--tls-key", identity.key]


@contextlib.contextmanager
def running_guarded(folder: Path) -> Iterator[Guarded]:
    """Start all components; kill them at the end."""
    guarded = Guarded(folder)
    try:
        guarded.start("scheduler", "worker", "detokenizer", "token", "certificate")
        yield guarded
    finally:
        guarded.close()
