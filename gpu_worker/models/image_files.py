"""Reads image files in a child process (image_file_reader.py): files come from clients, and the libraries that decode
them may crash or use any amount of memory and time.

A file that ends the child twice is refused; the next file gets a new child.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any

from midstream.errors import InvalidArgumentError
from midstream.python_process import python_command, python_environment
from midstream.socket_messages import receive, send

# A small file may contain a huge image. An image of few rows takes much more time to scale than its pixels suggest.
MAX_PIXELS, MAX_SIDE = 1 << 25, 1 << 14
# Limits of the child; the processor time is that for one file.
CPU_LIMIT_S = 10.0
MEMORY_BYTES = 1 << 30
# Time limit for a child that does not compute; its processor time has a limit of its own.
_WALL_LIMIT_S = 60.0
_TOO_LONG = "takes too long"
_NUM_TRIES = 2


class ImageFiles:
    """Reads image files; not thread-safe."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def read(self, data: bytes) -> Any:
        """Return the (first) image in a file, in RGB.

        Raises:
            InvalidArgumentError: The file is invalid, or cannot be read within the limits.
        """
        from PIL import Image

        reason = ""
        for _ in range(_NUM_TRIES):  # somebody else may have killed the first child
            if self._child is None:
                self._child = _Child()
            try:
                answer, pixels = self._child.read(data)
            except OSError as error:
                reason = _TOO_LONG if isinstance(error, TimeoutError) else self._child.end()
                self.close()
                if reason == _TOO_LONG:  # it would take as long again
                    break
                continue
            if "error" in answer:
                raise InvalidArgumentError(answer["error"], field="data")
            return Image.frombytes("RGB", (answer["width"], answer["height"]), pixels)
        raise InvalidArgumentError(f"cannot be read as an image: it {reason}", field="data")


class _Child:
    def __init__(self) -> None:
        self._connection, other = socket.socketpair()
        self._connection.settimeout(_WALL_LIMIT_S)
        self._process = subprocess.Popen(
            python_command("gpu_worker.models.image_file_reader"),
            stdin=other.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment({"PATH": os.environ.get("PATH", "")}),
        )
        other.close()

    def read(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        send(self._connection, {}, data)
        answer, pixels = receive(self._connection)
        assert isinstance(answer, dict)
        return answer, pixels

    def end(self) -> str:
        """Kill the process if it runs; return why it ended."""
        self._connection.close()
        self._process.kill()
        if self._process.wait() == -signal.SIGPROF:
            return _TOO_LONG
        return "crashes the process that reads it"
