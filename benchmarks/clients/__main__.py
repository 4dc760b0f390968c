"""Find out what clients do when a stream breaks, stands still, or is refused: `python -m benchmarks.clients`.

Each client is installed from PyPI or npm in the version given here, in a temporary folder or in `--folder`, and runs
against a scripted server. Needs Python, Node.js and npm. All limits are the clients' own where a run can wait for them,
so this takes 20 minutes; `--docs docs` writes the tables of docs/adapters.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.drivers import NODE, PYTHON
from benchmarks.clients.grpc_server import GrpcServer
from benchmarks.clients.server import APIS, NO_HEADERS, PROMPT, TEXT, Answer, Break, Scenario, Server, Status, Wait

PYTHON_PACKAGES = (
    "openai==3.57.0", "anthropic==2.14.0", "langchain-openai==1.7.4", "litellm==1.110.2", "grpcio==1.85.3",
)  # fmt: skip
NODE_PACKAGES = (
    "openai@6.49.0", "@anthropic-ai/sdk@1.14.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@grpc/grpc-js@1.14.7",
    "@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197",
)  # fmt: skip
OPENAI = ("chat/completions", "completions", "responses")
# Programs that run at the same time, and that start at the same time: a program that starts needs a processor for
# seconds, while the clients' own times should be measured on an idle machine.
AT_ONCE, STARTING = 60, 2
START_S = 20.0
LIMIT_S = 900.0
# How long a stream is silent to find a client's own limit, and how long it gets only keep-alives to find out whether
# they count: longer than the limit of 300 s of the clients whose limit cannot be lowered.
SILENT_S, KEPT_S, INTERVAL_S = 660.0, 330.0, 15.0
# The same for clients whose limit can be lowered.
LOW_IDLE_S, LOW_KEPT_S, LOW_INTERVAL_S = 5.0, 20.0, 1.0
RETRY_AFTER_S = (2, 59, 61, 119, 121)
COLUMNS = (
    "client", "stream cut", "closed unanswered", "silent stream", "no headers", "429", "503", "529", "`Retry-After`",
    "500 with `x-should-retry: false`",
)  # fmt: skip
BEGIN, END = "<!-- python -m benchmarks.clients -->\n", "\n<!-- end of clients -->"


@dataclass(frozen=True)
class Client:
    """A client program.

    Attributes:
        name: Name in the tables.
        package: Its package, which is also the name of its driver; `@openai/codex` and `@anthropic-ai/claude-code` are
            run directly.
        apis: Ends of the paths that it calls; none for a gRPC client.
        is_python: Whether the package is from PyPI.
        lowers_idle: Whether its limit of silence can be lowered.
    """

    name: str
    package: str
    apis: tuple[str, ...]
    is_python: bool = False
    lowers_idle: bool = False


CODEX, CLAUDE_CODE = "@openai/codex", "@anthropic-ai/claude-code"
CLIENTS = (
    Client("openai (Python)", "openai", OPENAI, is_python=True, lowers_idle=True),
    Client("openai (npm)", "openai", OPENAI),
    Client("anthropic (Python)", "anthropic", ("messages",), is_python=True, lowers_idle=True),
    Client("@anthropic-ai/sdk", "@anthropic-ai/sdk", ("messages",)),
    Client("langchain-openai", "langchain-openai", ("chat/completions", "responses"), is_python=True, lowers_idle=True),
    Client("litellm", "litellm", ("chat/completions",), is_python=True, lowers_idle=True),
    Client("AI SDK", "ai", OPENAI, lowers_idle=True),
    Client("Codex", CODEX, ("responses",), lowers_idle=True),
    Client("Claude Code", CLAUDE_CODE, ("messages",)),
    Client("grpcio", "grpcio", (), is_python=True),
    Client("@grpc/grpc-js", "@grpc/grpc-js", ()),
)
VERSIONS = dict(item.rsplit("@", 1) for item in NODE_PACKAGES)
PYTHON_VERSIONS = dict(item.split("==") for item in PYTHON_PACKAGES)


@dataclass(frozen=True)
class Outcome:
    """What a client did with one scenario.

    Attributes:
        is_whole: Whether it returned the whole text.
        error: What it reported.
        delays_s: Times between its calls.
        num_unstreamed: Number of calls without a stream.
        left_after_s: When it left a stream that waited; None if it did not.
    """

    is_whole: bool
    error: str
    delays_s: tuple[float, ...]
    num_unstreamed: int
    left_after_s: float | None

    @property
    def num_calls(self) -> int:
        return len(self.delays_s) + 1


class Laboratory:
    """Installed clients and the servers that they call."""

    def __init__(self, folder: Path, server: Server, grpc_server: GrpcServer) -> None:
        self._folder, self._server, self._grpc_server = folder, server, grpc_server
        self._turns, self._starts = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(STARTING)
        self._count = 0

    async def outcome(self, client: Client, api: str, answers: Sequence[Answer], idle_s: float = 0.0) -> Outcome:
        """Let a client make one call, with its repetitions."""
        self._count += 1
        name, scenario = f"s{self._count}", Scenario(answers)
        if client.apis:
            self._server.scenarios[name] = scenario
            url = f"{self._server.url}/{name}"
        else:
            self._grpc_server.scenarios[name] = scenario
            url, api = await self._grpc_server.url(name), f"/scripted.Streams/{name}"
        async with self._turns:
            whole, error = await self._run(client, url, api, idle_s, scenario)
        delays = tuple(after - before for before, after in zip(scenario.starts, scenario.starts[1:], strict=False))
        return Outcome(whole, error, delays, scenario.num_unstreamed, scenario.left_after_s)

    async def _run(self, client: Client, url: str, api: str, idle_s: float, scenario: Scenario) -> tuple[bool, str]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            environment = {"PATH": os.environ["PATH"], "HOME": home, "NO_COLOR": "1"}
            async with self._starts:
                process = await asyncio.create_subprocess_exec(
                    *self._command(client, url, api, idle_s),
                    cwd=home,
                    env=environment | _SETTINGS.get(client.package, {}) | {"ANTHROPIC_BASE_URL": url},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(scenario.called.wait(), START_S)
            try:
                async with asyncio.timeout(LIMIT_S):
                    output = (await process.communicate())[0].decode()
            except TimeoutError:
                process.kill()
                await process.wait()
                return False, f"still running after {LIMIT_S:.0f} s"
        if client.package in (CODEX, CLAUDE_CODE):
            return process.returncode == 0 and "".join(TEXT) in output, output.strip()[-200:]
        (line,) = (line for line in output.splitlines() if line.startswith("RESULT "))
        result = json.loads(line.removeprefix("RESULT "))
        return result["text"] == "".join(TEXT) and not result["error"], result["error"]

    def _command(self, client: Client, url: str, api: str, idle_s: float) -> list[str]:
        programs = self._folder / "node_modules" / ".bin"
        if client.package == CLAUDE_CODE:
            return [str(programs / "claude"), "-p", PROMPT]
        if client.package == CODEX:
            provider = "model_providers.here"
            settings: dict[str, object] = {
                "model": "m", "model_provider": "here", f"{provider}.name": "here", f"{provider}.base_url": url + "/v1",
                f"{provider}.wire_api": "responses",
            }  # fmt: skip
            if idle_s:
                settings[f"{provider}.stream_idle_timeout_ms"] = int(idle_s * 1000)
            flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
            return [str(programs / "codex"), "exec", *flags, "--skip-git-repo-check", PROMPT]
        asked = json.dumps({"url": url, "api": api, "prompt": PROMPT, "idle_s": idle_s})
        if client.is_python:
            return [str(self._folder / "bin" / "python"), "-c", PYTHON[client.package], asked]
        return ["node", str(self._folder / f"{_file_name(client.package)}.mjs"), asked]


_SETTINGS = {
    CLAUDE_CODE: {
        "ANTHROPIC_API_KEY": "-", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
}  # fmt: skip


def _file_name(package: str) -> str:
    return re.sub(r"\W+", "-", package)


def install(folder: Path) -> None:
    """Install all clients in one folder, unless they are there."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", *PYTHON_PACKAGES], check=True)
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--prefix", str(folder), *NODE_PACKAGES], check=True)
    for package, text in NODE.items():
        (folder / f"{_file_name(package)}.mjs").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Findings:
    """What one client does.

    Attributes:
        cut: A stream that is cut after its first text; the second call is answered.
        unanswered: A connection that is closed without an answer, always.
        silent: A stream that is silent before its first text.
        no_headers: A call that gets no answer, not even headers.
        refused: By status, a call that is always refused.
        retry_after: By number of seconds, a call that is refused with 429 and Retry-After once.
        final: A call that is refused with 500 and `x-should-retry: false` once; None for a gRPC client.
        forms: By API and form, a stream that gets only this form instead of text for longer than the client's limit.
    """

    client: Client
    cut: Outcome
    unanswered: Outcome
    silent: Outcome
    no_headers: Outcome
    refused: dict[int, Outcome]
    retry_after: dict[int, Outcome]
    final: Outcome | None
    forms: dict[tuple[str, str], Outcome]


async def examine(laboratory: Laboratory, client: Client) -> Findings:
    """Run all scenarios with one client, concurrently."""
    first = client.apis[0] if client.apis else ""
    async with asyncio.TaskGroup() as group:

        def ask(*answers: Answer, api: str = first, idle_s: float = 0.0) -> asyncio.Task[Outcome]:
            return group.create_task(laboratory.outcome(client, api, answers, idle_s))

        cut, unanswered = ask(Break(), Wait()), ask(Break(has_begun=False))
        silent, no_headers = ask(Wait(wait_s=SILENT_S), Wait()), ask(Wait(NO_HEADERS, SILENT_S), Wait())
        codes = (429, 503, 529) if client.apis else (429, 503)
        refused = {code: ask(Status(code)) for code in codes}
        final = ask(Status(500, should_retry="false"), Wait()) if client.apis else None
        retry_after = {seconds: ask(Status(429, str(seconds)), Wait()) for seconds in RETRY_AFTER_S}
        forms: dict[tuple[str, str], asyncio.Task[Outcome]] = {}
        for api in client.apis:
            for form in APIS[api].forms:
                if client.lowers_idle:
                    answer = Wait(form, LOW_KEPT_S, LOW_INTERVAL_S, num_texts=1)
                    forms[api, form] = ask(answer, Break(), api=api, idle_s=LOW_IDLE_S)
                elif api == first:
                    forms[api, form] = ask(Wait(form, KEPT_S, INTERVAL_S, num_texts=1), Break(), api=api)
    return Findings(
        client,
        cut=cut.result(),
        unanswered=unanswered.result(),
        silent=silent.result(),
        no_headers=no_headers.result(),
        refused={code: task.result() for code, task in refused.items()},
        retry_after={seconds: task.result() for seconds, task in retry_after.items()},
        final=None if final is None else final.result(),
        forms={key: task.result() for key, task in forms.items()},
    )


def retries_of(outcome: Outcome) -> str:
    """Describe the repetitions of a call that always fails."""
    delays = outcome.delays_s
    if not delays:
        return "not repeated"
    shown = ", ".join(f"{delay:.1f}" for delay in delays[:5]) + (", …" if len(delays) > 5 else "")
    return f"{len(delays)} more, after {shown} s"


def obeyed(found: Findings) -> str:
    """Describe which values of Retry-After a client waits for."""
    waits = {s for s, outcome in found.retry_after.items() if outcome.delays_s and outcome.delays_s[0] >= 0.9 * s}
    if not waits:
        return "not read"
    most = max(waits)
    above = [s for s in found.retry_after if s > most]
    if not above:
        return f"any value (tested to {most} s)"
    gives_up = not found.retry_after[above[0]].delays_s
    return f"to {most} s; from {above[0]} s on " + ("it gives up" if gives_up else "it waits for its own time instead")


def silence(outcome: Outcome) -> str:
    """Describe what a client does with silence."""
    if outcome.left_after_s is None:
        return f"waits (tested to {SILENT_S:.0f} s)"
    again = "; calls again" if outcome.delays_s else "; error"
    return f"{outcome.left_after_s:.0f} s{again}" + (", without a stream" if outcome.num_unstreamed else "")


def after_cut(outcome: Outcome) -> str:
    """Describe what a client does when a stream breaks after its first text."""
    if not outcome.delays_s:
        return "no error" if not outcome.error else "error"
    return f"calls again after {outcome.delays_s[0]:.1f} s" + (", without a stream" if outcome.num_unstreamed else "")


def version_of(client: Client) -> str:
    """Return the version of a client."""
    return (PYTHON_VERSIONS if client.is_python else VERSIONS)[client.package]


def tables(all_found: Sequence[Findings]) -> str:
    """Return the tables of docs/adapters.md."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        f"| {' | '.join(['---'] * len(COLUMNS))} |",
    ]
    for found in all_found:
        cells = [
            f"{found.client.name} {version_of(found.client)}",
            after_cut(found.cut),
            retries_of(found.unanswered),
            silence(found.silent),
            silence(found.no_headers),
            *(retries_of(found.refused[code]) if code in found.refused else "" for code in (429, 503, 529)),
            obeyed(found),
            "" if found.final is None else "repeated" if found.final.delays_s else "not repeated",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| API | form | counts as activity for | does not for |", "| --- | --- | --- | --- |"]
    for api, shape in APIS.items():
        for form in shape.forms:
            outcomes = {found.client.name: found.forms[api, form] for found in all_found if (api, form) in found.forms}
            kept = [name for name, outcome in outcomes.items() if outcome.is_whole and not outcome.delays_s]
            yes, no = ", ".join(kept), ", ".join(name for name in outcomes if name not in kept)
            lines.append(f"| `/v1/{api}` | {form} | {yes} | {no} |")
    return "\n".join(lines)


async def examine_all(folder: Path, names: Sequence[str]) -> list[Findings]:
    """Run all scenarios with all clients, or those with these names."""
    async with Server().running() as server, GrpcServer().running() as grpc_server:
        laboratory = Laboratory(folder, server, grpc_server)
        chosen = [client for client in CLIENTS if not names or client.name in names]
        return await asyncio.gather(*(examine(laboratory, client) for client in chosen))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="Folder for the clients, kept for another run.")
    parser.add_argument("--docs", type=Path, help="Folder of the documentation to write to.")
    parser.add_argument("--client", action="append", default=[], choices=[client.name for client in CLIENTS])
    arguments = parser.parse_args()
    if shutil.which("npm") is None:
        parser.error("needs Node.js and npm")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        install(folder)
        began = time.monotonic()
        text = tables(asyncio.run(examine_all(folder, arguments.client)))
    print(text, f"\n{time.monotonic() - began:.0f} s", sep="\n")
    if arguments.docs is not None:
        page = arguments.docs / "adapters.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
