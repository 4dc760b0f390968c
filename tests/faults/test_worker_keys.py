"""CURVE on the worker port: which peers may connect, and which configurations are rejected."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zmq

from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.scheduler_link.link import EpochStarted, SchedulerLink, Stopped
from midstream.config import SchedulerConfig, WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder
from midstream.security.curve import WorkerCredentials, make_key_pair, read_key_pair, read_public_key
from midstream.telemetry import Metrics
from protos import worker_pb2
from scheduler.edge.worker_keys import WorkerKeys
from tests.fakes.worker import FakeWorker, FakeWorkerConfig
from tests.integration.named_processes import ROOT
from tests.integration.service import midstream
from tests.ports import free_ports

SCHEDULER = [sys.executable, "-m", "scheduler", "--journal", "off"]


@dataclass(frozen=True)
class Guarded:
    """A scheduler process whose worker port requires CURVE keys."""

    address: str
    http_port: int
    keys: Path
    allowed: Path

    def credentials(self, name: str, server: str = "scheduler") -> WorkerCredentials:
        own = read_key_pair(str(self.keys / f"{name}.key_secret"), "")
        return WorkerCredentials(own, read_public_key(str(self.keys / f"{server}.key"), ""))

    @contextlib.contextmanager
    def dealer(
        self, context: zmq.Context[zmq.Socket[bytes]], message: bytes, credentials: WorkerCredentials | None
    ) -> Iterator[zmq.Socket[bytes]]:
        """Return a socket that has sent a message, whether or not the peer accepts it."""
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            if credentials is not None:
                credentials.secure(dealer)
            dealer.connect(self.address)
            dealer.send(message)
            yield dealer

    def worker(self, name: str) -> FakeWorker:
        model = open_model_folder("smollm2")
        return FakeWorker(
            FakeWorkerConfig(
                scheduler=self.address,
                group_id=name,
                model_fingerprint=model.fingerprint,
                vocab_size=model.vocab_size,
                curve_secret_key=str(self.keys / f"{name}.key_secret"),
                curve_server_key=str(self.keys / "scheduler.key"),
            )
        )

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=240) as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"midstream:{name} ")).split()[1])

    def wait_for(self, name: str, least: float) -> None:
        deadline = time.monotonic() + 240
        while self.metric(name) < least:
            assert time.monotonic() < deadline, name
            time.sleep(0.05)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    keys = tmp_path_factory.mktemp("keys")
    allowed = keys / "allowed"
    allowed.mkdir()
    for name in ("scheduler", "worker", "stranger", "other-scheduler"):
        make_key_pair(keys, name)
    allow(keys, allowed, "worker")
    port, worker_port, http_port = free_ports(3)
    ports = ["--port", str(port), "--worker-port", str(worker_port), "--http-port", str(http_port)]
    curve = ["--curve", "--curve-secret-key", str(keys / "scheduler.key_secret"), "--curve-worker-keys", str(allowed)]
    with (keys / "log").open("wb") as log:
        process = subprocess.Popen([*SCHEDULER, *ports, *curve], cwd=ROOT, stdout=log, stderr=log)
    guarded = Guarded(f"tcp://127.0.0.1:{worker_port}", http_port, keys, allowed)
    try:
        deadline = time.monotonic() + 240
        while b'"serving"' not in (keys / "log").read_bytes():
            assert process.poll() is None, (keys / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield guarded
    finally:
        process.kill()
        process.wait()


def allow(keys: Path, allowed: Path, name: str) -> None:
    (allowed / f".{name}").write_bytes((keys / f"{name}.key").read_bytes())
    (allowed / f".{name}").replace(allowed / f"{name}.key")


def test_only_workers_with_a_known_key_register(guarded: Guarded) -> None:
    worker = guarded.worker("worker").start()
    assert worker.registered.wait(240)
    register = worker_pb2.WorkerMessage(register=worker._registration()).SerializeToString()
    refused = guarded.metric("num_refused_connections_total")
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        attempts = [
            stack.enter_context(guarded.dealer(context, register, credentials))
            for credentials in (
                guarded.credentials("stranger"),
                guarded.credentials("worker", server="other-scheduler"),
                None,
            )
        ]
        guarded.wait_for("num_refused_connections_total", refused + len(attempts))
        assert not any(dealer.poll(0) for dealer in attempts)
    assert guarded.metric("num_worker_groups") == 1
    worker.stop()


def test_an_added_key_is_accepted_at_the_next_attempt(guarded: Guarded) -> None:
    make_key_pair(guarded.keys, "newcomer")
    newcomer = guarded.worker("newcomer")
    refused = guarded.metric("num_refused_connections_total")
    link = SchedulerLink(
        guarded.address,
        newcomer._registration(),
        Metrics(),
        worker_pb2.MemoryUsage,
        cast("Any", None),  # no LoRA adapters
        KeptBlocks(np.zeros(64, dtype=np.uint64)),
        credentials=guarded.credentials("newcomer"),
    )
    link.start()
    # The worker is rejected, even when it retries by itself.
    guarded.wait_for("num_refused_connections_total", refused + 2)
    allow(guarded.keys, guarded.allowed, "newcomer")
    assert isinstance(link.inbox.get(timeout=240), EpochStarted)
    link.leave()
    assert isinstance(link.inbox.get(timeout=240), Stopped)
    link.join()


def test_a_removed_key_cannot_reconnect(guarded: Guarded) -> None:
    make_key_pair(guarded.keys, "leaver")
    allow(guarded.keys, guarded.allowed, "leaver")
    leaver = guarded.worker("leaver").start()
    assert leaver.registered.wait(240)
    leaver.stop()
    (guarded.allowed / "leaver.key").unlink()
    refused = guarded.metric("num_refused_connections_total")
    register = worker_pb2.WorkerMessage(register=leaver._registration()).SerializeToString()
    with zmq.Context() as context, guarded.dealer(context, register, guarded.credentials("leaver")) as again:
        guarded.wait_for("num_refused_connections_total", refused + 1)
        assert not again.poll(0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_key_pair(folder, "a")
    make_key_pair(folder, "b")
    (folder / "empty.key_secret").touch()
    (folder / "zero.key_secret").write_text('public-key = ""\nsecret-key = ""\n')
    pair = read_key_pair(str(folder / "a.key_secret"), "")
    zeros = "0" * 40
    (folder / "zeros.key_secret").write_text(f'public-key = "{pair.public.decode()}"\nsecret-key = "{zeros}"\n')
    (folder / "short.key_secret").write_text(f'public-key = "{pair.public.decode()}"\nsecret-key = "abc"\n')
    other = read_key_pair(str(folder / "b.key_secret"), "")
    (folder / "mixed.key_secret").write_text(
        f'public-key = "{pair.public.decode()}"\nsecret-key = "{other.secret.decode()}"\n'
    )
    (folder / "nobody").mkdir()
    return folder


BAD_SECRETS = ["", "nowhere", "a.key", "empty.key_secret", "zero.key_secret", "zeros.key_secret", "short.key_secret"]


@pytest.mark.parametrize("secret", [*BAD_SECRETS, "mixed.key_secret"])
def test_no_side_starts_with_an_invalid_secret(keys: Path, secret: str) -> None:
    path = str(keys / secret) if secret else ""
    with pytest.raises(ConfigError) as raised:
        WorkerKeys.from_config(SchedulerConfig(curve=True, curve_secret_key=path, curve_worker_keys=str(keys)))
    assert raised.value.field == "curve_secret_key"
    with pytest.raises(ConfigError) as raised:
        WorkerCredentials.from_config(
            WorkerConfig(curve=True, curve_secret_key=path, curve_server_key=str(keys / "a.key"))
        )
    assert raised.value.field == "curve_secret_key"


def test_keys_that_could_not_be_read_for_a_moment_are_read_again(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.key").write_bytes((keys / "a.key").read_bytes())
    allowed = WorkerKeys(str(keys / "a.key_secret"), str(tmp_path))
    key = read_public_key(str(keys / "a.key"), "")
    assert allowed.callback("", key)
    (tmp_path / "old.key").unlink()
    make_key_pair(tmp_path, "new")

    def fail(folder: str, field: str) -> frozenset[bytes]:
        raise ConfigError("too many open files", field=field)

    with monkeypatch.context() as patch:
        patch.setattr("scheduler.edge.worker_keys.read_public_keys", fail)
        assert allowed.callback("", key)
    assert not allowed.callback("", key)


def test_contradictions_refuse_to_start(keys: Path) -> None:
    secret, public = str(keys / "a.key_secret"), str(keys / "a.key")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("curve_worker_keys", {"curve": True, "curve_secret_key": secret}),
        ("curve_worker_keys", {"curve": True, "curve_secret_key": secret, "curve_worker_keys": "/nowhere"}),
        ("curve_worker_keys", {"curve": True, "curve_secret_key": secret, "curve_worker_keys": str(keys / "nobody")}),
        ("curve_secret_key", {"curve_secret_key": secret}),
        ("curve_worker_keys", {"curve_worker_keys": str(keys)}),
    ]
    for field, settings in cases:
        with pytest.raises(ConfigError) as raised:
            WorkerKeys.from_config(SchedulerConfig(**settings))
        assert raised.value.field == field, settings
    for field, settings in (
        ("curve_server_key", {"curve": True, "curve_secret_key": secret}),
        ("curve_server_key", {"curve": True, "curve_secret_key": secret, "curve_server_key": "/nowhere"}),
        ("curve_server_key", {"curve_server_key": public}),
        ("curve_secret_key", {"curve": True, "curve_server_key": public}),
    ):
        with pytest.raises(ConfigError) as raised:
            WorkerCredentials.from_config(WorkerConfig(**settings))
        assert raised.value.field == field, settings
    assert WorkerKeys.from_config(SchedulerConfig()) is None
    assert WorkerCredentials.from_config(WorkerConfig()) is None


def test_a_scheduler_process_with_an_empty_secret_ends_at_once(keys: Path) -> None:
    """This happens if a Secret lacks the key, so that the variable is set but empty."""
    environment = {
        "MIDSTREAM_CURVE": "true",
        "MIDSTREAM_CURVE_SECRET_KEY": "",
        "MIDSTREAM_CURVE_WORKER_KEYS": str(keys),
    }
    command = [*SCHEDULER, "--port", "0", "--worker-port", "0"]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 2
    assert "curve_secret_key: is empty, but curve is on" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_makes_a_pair_that_only_its_owner_can_read(tmp_path: Path) -> None:
    result = midstream("keys", "worker-7", "--output", str(tmp_path / "new"))
    assert result.returncode == 0, result.stderr
    secret, public = tmp_path / "new" / "worker-7.key_secret", tmp_path / "new" / "worker-7.key"
    assert (secret.stat().st_mode & 0o777, public.stat().st_mode & 0o777) == (0o600, 0o644)
    assert read_key_pair(str(secret), "").public == read_public_key(str(public), "")
    assert read_key_pair(str(secret), "").secret.decode() not in result.stdout
    assert "already exists" in midstream("keys", "worker-7", "--output", str(tmp_path / "new")).stderr
    assert "name" in midstream("keys", "../worker", "--output", str(tmp_path)).stderr
