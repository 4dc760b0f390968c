"""Codex and Claude Code, unmodified, in a session with a tool and a scripted model.

Their programs must be on PATH: `npm install --prefix DIR @openai/codex @anthropic-ai/claude-code`, then
`PATH=DIR/node_modules/.bin:$PATH pytest tests/router/adapters/test_agents.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.protocols.conversation import ChatModel
from tests.router.conftest import Cluster
from tests.router.parsers.transcripts import model_format

ASKED = "What does the file note.txt say? Read it with a tool."
SECRET, ANSWER = "plover-4711", "It says plover, and a number."
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LIMIT_S = 240


@pytest.fixture(scope="session")
def folder(folder: ModelFolder) -> ModelFolder:
    """Return a model whose context is long enough for the instructions of an agent, with a template that renders
    tools.
    """
    return dataclasses.replace(folder, max_sequence_length=1 << 18, chat_template=TEMPLATE)


def needed(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH (npm packages @openai/codex, @anthropic-ai/claude-code)")
    return path


@asynccontextmanager
async def scripted_model(cluster: Cluster, tokenizer: Tokenizer, call: Callable[[str], str]) -> AsyncIterator[str]:
    """Return a router's HTTP address. The model writes `call` for a prompt that asks for the file but does not contain
    its text yet, and ANSWER for all other prompts.
    """
    chat = ChatModel(model_format("hermes", ""))
    router = await cluster.add_router(await cluster.add_detokenizer(), chat=chat)
    assert router.http is not None
    scheduler = cluster.scheduler

    async def write() -> None:
        answered = set[str]()
        while True:
            await scheduler.until(lambda: scheduler.requests.keys() - answered)
            for name in scheduler.requests.keys() - answered:
                prompt = tokenizer.decode(
                    [*scheduler.requests[name].request.token_ids.values], skip_special_tokens=False
                )
                asks = ASKED in prompt and SECRET not in prompt
                for token in tokenizer.encode(call(prompt) if asks else ANSWER):
                    scheduler.emit(name, [token])
                scheduler.end(name, reason=pb.FINISH_REASON_STOP)
                answered.add(name)

    writing = asyncio.create_task(write())
    try:
        yield f"http://127.0.0.1:{router.http.port}"
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def run(*command: str, folder: Path, **environment: str) -> str:
    """Run the program; return its output."""
    (folder / "note.txt").write_text(SECRET + "\n")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (printed + complaints).decode()
    return printed.decode()


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run_codex(url: str, folder: Path, **settings: object) -> str:
    """Run Codex with a router's HTTP address and more settings; return its output."""
    codex = needed("codex")
    settings = {
        "model": "smollm2",
        "model_provider": "here",
        "model_providers.here.name": "here",
        "model_providers.here.base_url": url + "/v1",
        "model_providers.here.wire_api": "responses",
        **settings,
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    flags += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return await run(codex, "exec", *flags, ASKED, folder=folder)


async def test_codex(cluster: Cluster, tokenizer: Tokenizer, tmp_path: Path) -> None:
    needed("codex")

    def call(prompt: str) -> str:
        if '"exec_command"' in prompt:
            return tool_call("exec_command", cmd="cat note.txt")
        return tool_call("shell", command=["cat", "note.txt"])

    async with scripted_model(cluster, tokenizer, call) as url:
        printed = await run_codex(url, tmp_path)
    assert printed.strip().endswith(ANSWER), printed
    assert len(cluster.scheduler.requests) == 2


# An MCP server with one tool, which returns its argument and a secret.
MCP_SERVER = f"""
import json, sys
TOOL = {{"name": "read", "description": "Reads.", "inputSchema": {{"type": "object"}}}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    params = asked.get("params", {{}})
    result = {{
        "initialize": lambda: {{
            "protocolVersion": params["protocolVersion"],
            "capabilities": {{"tools": {{}}}},
            "serverInfo": {{"name": "files", "version": "1"}},
        }},
        "tools/list": lambda: {{"tools": [TOOL]}},
        "tools/call": lambda: {{"content": [{{"type": "text", "text": "{SECRET} " + params["arguments"]["file"]}}]}},
    }}.get(asked["method"], dict)()
    print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": result}}), flush=True)
"""


async def test_codex_with_an_mcp_server(cluster: Cluster, tokenizer: Tokenizer, tmp_path: Path) -> None:
    needed("codex")
    server = tmp_path / "server.py"
    server.write_text(MCP_SERVER)
    call = tool_call("mcp__files__read", file="note.txt")
    async with scripted_model(cluster, tokenizer, lambda _: call) as url:
        settings = {"mcp_servers.files.command": sys.executable, "mcp_servers.files.args": [str(server)]}
        printed = await run_codex(url, tmp_path, **settings)
    assert printed.strip().endswith(ANSWER), printed
    last = list(cluster.scheduler.requests.values())[-1].request
    assert f"{SECRET} note.txt" in tokenizer.decode([*last.token_ids.values])


async def test_claude_code(cluster: Cluster, tokenizer: Tokenizer, tmp_path: Path) -> None:
    claude = needed("claude")
    async with scripted_model(
        cluster, tokenizer, lambda _: tool_call("Read", file_path=str(tmp_path / "note.txt"))
    ) as url:
        printed = await run(
            claude,
            "--print",
            ASKED,
            "--allowedTools",
            "Read",
            folder=tmp_path,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL="smollm2",
            ANTHROPIC_SMALL_FAST_MODEL="smollm2",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert printed.strip() == ANSWER
