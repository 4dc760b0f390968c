"""Starts the processes in which grammars are compiled and outputs validated, calls them with a time limit, and kills
them if they exceed it.
"""

from __future__ import annotations

import importlib.util
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.grammar.messages import OVERRUN_STATUS, READY, Guide
from midstream.model.folder import ModelFolder
from midstream.python_process import bare_environment, python_command
from midstream.socket_messages import receive, send

if TYPE_CHECKING:
    from protos import generation_pb2

_MEMORY_BYTES = 2 << 30
LIMIT_S = 2.0
# Ratio of the limits on a call's elapsed time and its processor time; on a busy machine, more time elapses.
_PATIENCE = 5
_START_LIMIT_S = 60.0
# Time in which a process that has closed its connection ends.
_EXIT_S = 1.0


def is_available() -> bool:
    """Return whether the grammar library is installed."""
    return importlib.util.find_spec("llguidance") is not None


def guide_of(config: generation_pb2.GuidedDecodingConfig) -> Guide:
    """Return the guide of a request."""
    from protos import generation_pb2  # here, because workers also run where protobuf is not installed

    kind = generation_pb2.GuideType.Name(config.guide_type).removeprefix("GUIDE_TYPE_").lower()
    return Guide("ebnf" if kind == "ebnf_grammar" else kind, config.guide)


class TokenizerError(OSError):
    """The grammar library cannot read the model's tokenizer, so that no guide can be used."""


class _ChildProcess:
    """A child process with limited memory. Not thread-safe."""

    def __init__(self, module: str, limit_s: float, *arguments: str) -> None:
        """Start the process, but do not wait until it is ready."""
        self._connection, other = socket.socketpair()
        self._limit_s = limit_s
        self._is_ready = False
        self._process = subprocess.Popen(
            python_command(module, str(other.fileno()), str(_MEMORY_BYTES), str(limit_s), *arguments),
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=bare_environment(RAYON_NUM_THREADS="1"),
        )
        other.close()

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return whether the process is ready.

        Raises:
            TokenizerError: Its tokenizer cannot be loaded.
            OSError: The process has died.
        """
        if not self._is_ready and select.select([self._connection], [], [], wait_s)[0]:
            self._connection.settimeout(self._limit_s)
            answer, _ = receive(self._connection)
            if answer != READY:
                raise TokenizerError(str(answer))
            self._is_ready = True
        return self._is_ready

    def _call(self, request: object) -> object:
        """Return the response to a request. Raises OSError if the process died or took too long; kill it."""
        if not self.is_ready(_START_LIMIT_S):
            raise TimeoutError("the process does not start")
        self._connection.settimeout(_PATIENCE * self._limit_s)
        send(self._connection, request)
        return receive(self._connection)[0]

    def was_overrun(self) -> bool:
        """Return whether the process, which has died or does not respond, took too long."""
        try:
            return self._process.wait(_EXIT_S) in (OVERRUN_STATUS, -signal.SIGPROF)
        except subprocess.TimeoutExpired:
            return True

    def kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class GrammarProcess(_ChildProcess):
    """The grammar process for one model's tokenizer."""

    def __init__(self, folder: ModelFolder, *, limit_s: float = LIMIT_S) -> None:
        """Start the process, but do not wait until it is ready.

        Args:
            limit_s: Time limit for masks, and for the processor time of the compilation of a guide.
        """
        tokenizer = (str(folder.path / "tokenizer.json"), str(folder.vocab_size))
        super().__init__("midstream.grammar.child", limit_s, *tokenizer, ",".join(map(str, folder.end_ids)))

    def check(self, guide: Guide) -> str:
        """Return the error in a guide; empty if it is valid.

        Raises:
            TokenizerError: The tokenizer cannot be loaded.
            OSError: The process died or took too long; kill it.
        """
        return str(self._call({"check": [guide.kind, guide.text]}))

    def ask_masks(self, items: list[dict[str, object]]) -> None:
        """Request the masks of rows (see child.py); `take_masks` returns them. Precondition: the process is ready.

        Raises:
            OSError: The process died; kill it.
        """
        send(self._connection, {"rows": items})

    def take_masks(self) -> tuple[list[str], bytes]:
        """Return the response to `ask_masks`. Raises OSError if the process died or took too long; kill it."""
        states, masks = receive(self._connection)
        assert isinstance(states, list)
        return states, masks


class ValidationProcess(_ChildProcess):
    """The process that validates outputs. It is separate, so that the end of an output does not wait for grammars."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        """Start the process, but do not wait until it is ready; `limit_s` limits the processor time of a call."""
        super().__init__("midstream.grammar.validation_child", limit_s)

    def problems(self, parts: Sequence[tuple[str, str]]) -> list[list[str]]:
        """Return why each part, given by a JSON schema and a JSON text, is not valid; nothing if it is.

        Raises:
            OSError: The process died or took too long; kill it.
        """
        found = self._call(list(parts))
        assert isinstance(found, list)
        return found
