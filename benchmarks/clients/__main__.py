"""Find out what clients do when a stream breaks, waits, or is refused: `python -m benchmarks.clients`.

Each client is installed from PyPI or npm, in the version that is given here, in a folder of its own, and runs against
a scripted server. The result is the tables in docs/adapters.md (`--docs docs`). With the defaults of the clients, whose
longest limit is ten minutes, this takes 13 minutes; `--quick` sets lower limits where a client has a setting for it,
and leaves out the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.grpc_server import GrpcServer
from benchmarks.clients.server import APIS, PROMPT, TEXT, Answer, Break, Scenario, Server, Status, Wait

DRIVERS = Path(__file__).parent / "drivers"
PYTHON = ("openai==3.57.0", "anthropic==2.14.0", "langchain-openai==LC", "litellm==1.110.2", "grpcio==1.85.3")


@dataclass(frozen=True)
class Client:
    """A client program.

    Attributes:
        name: As in the table.
        apis: The APIs that it can use: ends of paths, or `grpc`.
        driver: Script in the folder of drivers, or the name of an agent's command.
        default_idle: Whether its own limit can be lowered for `--quick`.
    """

    name: str
    apis: tuple[str, ...]
    driver: str
    has_idle_setting: bool = True


OPENAI = ("chat/completions", "completions", "responses")
CLIENTS = (
    Client("openai (Python)", OPENAI, "openai_python.py"),
    Client("openai (npm)", OPENAI, "openai_node.mjs", has_idle_setting=False),
    Client("anthropic (Python)", ("messages",), "anthropic_python.py"),
    Client("@anthropic-ai/sdk (npm)", ("messages",), "anthropic_node.mjs", has_idle_setting=False),
    Client("langchain-openai", ("chat/completions", "responses"), "langchain_python.py"),
    Client("litellm", ("chat/completions",), "litellm_python.py"),
    Client("ai, @ai-sdk/openai (npm)", OPENAI, "ai_sdk_node.mjs"),
    Client("Codex", ("responses",), "codex"),
    Client("Claude Code", ("messages",), "claude", has_idle_setting=False),
    Client("grpcio", ("grpc",), "grpc_python.py", has_idle_setting=False),
    Client("@grpc/grpc-js (npm)", ("grpc",), "grpc_node.mjs", has_idle_setting=False),
)


@dataclass
class Outcome:
    """What a client did.

    Attributes:
        is_whole: Whether it showed the whole text.
        error: What it reported, or nothing.
        delays_s: Time between its calls.
        left_after_s: When it left a stream that waited.
    """

    is_whole: bool
    error: str
    delays_s: list[float] = field(default_factory=list)
    left_after_s: float | None = None
    took_s: float = 0.0
