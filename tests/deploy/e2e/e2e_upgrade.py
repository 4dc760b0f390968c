"""An upgrade drill: each process of a service is replaced by that of another version, and back, while answers stream.

Run by `make e2e-upgrade`, from the commit FROM (by default the tag or else the commit of this version) to HEAD and
back. No stream fails, and each has all tokens once, which are those that one of the versions computes alone.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from midstream import __version__
from midstream.cli.health import probe_health
from midstream.cli.kill_demo import PROMPTS, SEED
from midstream.client import AsyncClient, SamplingParams
from tests.deploy.rendering import ROOT
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(900)
NUM_STREAMS = 4
MAX_TOKENS = 96
LIMIT_S = 240
NAMES = ("router-0", "router-1", "detokenizer-0", "detokenizer-1", "worker-0", "worker-1", "scheduler")


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def commit_before() -> str:
    """Return the commit to upgrade from."""
    if name := os.environ.get("FROM"):
        return name
    if git("tag", "--list", f"v{__version__}").strip():
        return f"v{__version__}"
    found = git("log", "--format=%H", f'-S__version__ = "{__version__}"', "--", "midstream/__init__.py").split()
    return found[-1].decode()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sources of the earlier version; it uses the same installed packages."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit_before()))) as archive:
        archive.extractall(folder, filter="data")
    if (ROOT / "kernels" / "_build").is_dir():  # those whose sources are equal are not compiled again
        shutil.copytree(ROOT / "kernels" / "_build", folder / "kernels" / "_build")
    return folder


class Fleet:
    """The processes by name, each with the folder of its version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        scheduler, worker_port, *ports = free_ports(2 + 2 * 2 + len(NAMES))
        self._http = dict(zip(NAMES, ports, strict=False))
        self.routers = [f"127.0.0.1:{port}" for port in ports[len(NAMES) : len(NAMES) + 2]]
        detokenizers = [f"127.0.0.1:{port}" for port in ports[len(NAMES) + 2 :]]
        links = f"--schedulers 127.0.0.1:{scheduler}"
        journal = folder / "journal"
        self._commands = {
            "scheduler": f"scheduler --port {scheduler} --worker-port {worker_port} --journal-path {journal}",
        }
        for number in range(2):
            own = f"--port {detokenizers[number].rpartition(':')[2]}"
            self._commands[f"detokenizer-{number}"] = f"detokenizer {own} {links}"
            own = f"--port {self.routers[number].rpartition(':')[2]}"
            self._commands[f"router-{number}"] = f"router {own} {links} --detokenizers {','.join(detokenizers)}"
            self._commands[f"worker-{number}"] = f"gpu_worker --scheduler tcp://127.0.0.1:{worker_port}"

    def start(self, name: str, version: Path) -> None:
        part, *flags = self._commands[name].split()
        command = [sys.executable, "-P", "-m", part, *flags, "--http-port", str(self._http[name]), "--model", "smollm2"]
        variables = {"PYTHONPATH": str(version), "MIDSTREAM_DRAIN_TIMEOUT_S": "3"}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=os.environ | variables, cwd=self._folder, stdout=log, stderr=log
            )

    async def wait_for(self, name: str) -> None:
        """Wait until a process is healthy."""
        deadline = time.monotonic() + LIMIT_S
        while (problem := await probe_health(f"127.0.0.1:{self._http[name]}")) is not None:
            log = (self._folder / f"{name}.log").read_text(encoding="utf-8")[-3000:]
            assert self._processes[name].poll() is None, log
            assert time.monotonic() < deadline, f"{name}: {problem}\n{log}"
            await asyncio.sleep(0.1)

    async def replace(self, name: str, version: Path) -> None:
        """Stop a process as an upgrade does, and start that of `version`."""
        self._processes[name].send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._processes[name].wait, LIMIT_S)
        self.start(name, version)
        await self.wait_for(name)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextmanager
def fleet_of(folder: Path, version: Path) -> Iterator[Fleet]:
    fleet = Fleet(folder)
    try:
        for name in NAMES:
            fleet.start(name, version)
        yield fleet
    finally:
        fleet.close()


async def answer(client: AsyncClient, number: int) -> list[int]:
    """Return the tokens of an answer to a prompt, which must arrive once and in order."""
    prompt, temperature = PROMPTS[number]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=SEED, ignore_eos=True)
    tokens: list[int] = []
    async for chunk in client.generate(prompt, sampling=sampling):
        assert chunk.token_offset == len(tokens)
        tokens += chunk.token_ids
    assert len(tokens) == MAX_TOKENS
    return tokens


class Load:
    """Streams that run all the time.

    Attributes:
        answers: The number of the prompt and the tokens of each ended stream.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, list[int]]] = []
        self._has_grown = asyncio.Event()
        self._is_ending = False

    async def wait_for(self, count: int) -> None:
        """Wait until this many streams have ended."""
        while len(self.answers) < count:
            self._has_grown.clear()
            await self._has_grown.wait()

    @asynccontextmanager
    async def running(self, client: AsyncClient) -> AsyncIterator[None]:
        async def repeat(number: int) -> None:
            while not self._is_ending:
                self.answers.append((number, await answer(client, number)))
                self._has_grown.set()
                number = (number + 1) % len(PROMPTS)

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(repeat(number))
            yield
            self._is_ending = True


async def test_every_process_is_upgraded_and_rolled_back_under_live_streams(earlier: Path, tmp_path: Path) -> None:
    took_s: dict[str, float] = {}
    load = Load()
    with fleet_of(tmp_path, earlier) as fleet:
        for name in NAMES:
            await fleet.wait_for(name)
        async with AsyncClient(fleet.routers, unavailable_timeout_s=120) as client:
            expected = [[await answer(client, number) for number in range(len(PROMPTS))]]
            async with load.running(client):
                for direction, version in (("upgrade", ROOT), ("rollback", earlier)):
                    for name in NAMES:
                        began, num_before = time.monotonic(), len(load.answers)
                        await fleet.replace(name, version)
                        took_s[f"{direction} of {name}"] = time.monotonic() - began
                        await load.wait_for(num_before + 2 * NUM_STREAMS)  # some began with the new process
                    if version == ROOT:
                        expected.append([await answer(client, number) for number in range(len(PROMPTS))])
    for step, seconds in took_s.items():
        print(f"{seconds:6.1f} s  {step}")
    print(f"{len(load.answers)} streams, from {commit_before()[:12]} to HEAD and back")
    assert len(load.answers) >= 2 * len(NAMES) * 2 * NUM_STREAMS
    wrong = [number for number, tokens in load.answers if tokens not in [of[number] for of in expected]]
    assert wrong == []
