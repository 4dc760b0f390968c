"""Reads image files in separate processes (image_file_reader.py): files come from clients, and the libraries that
decode them may crash, use any amount of memory and time, or execute code that a file contains.

A child process, which never sees a file, forks a reader for each file. The file and the image travel over a connection
that only this reader has, so that no file affects the image of another. A file that makes its reader die twice is
rejected.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from typing import Any

from midstream.errors import InvalidArgumentError
from midstream.python_process import bare_environment, python_command
from midstream.socket_messages import receive, send

# A small file may contain a huge image. An image of few rows takes much more time to scale than its pixels suggest.
MAX_PIXELS, MAX_SIDE = 1 << 25, 1 << 14
# Limits of a reader.
CPU_LIMIT_S = 10.0
MEMORY_BYTES = 1 << 30
# Limit of a reader's elapsed time, in case it waits instead of computing; its processor time has a separate limit.
WALL_LIMIT_S = 60.0
_TOO_LONG = "takes too long"
_CRASHES = "crashes the process that reads it"
_MAX_ANSWER_BYTES = 3 * MAX_PIXELS + (1 << 16)
EXIT_CODE = struct.Struct("<i")
_NUM_TRIES = 2
_MAX_REASON = 300


class ImageFiles:
    """Reads image files; not thread-safe."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def close(self) -> None:
        """Stop the child process."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def read(self, data: bytes) -> Any:
        """Return the (first) image in a file, in RGB. Raises InvalidArgumentError if it is invalid or too large."""
        reason = ""
        for _ in range(_NUM_TRIES):  # the first reader may have been killed from outside
            if self._child is None:
                self._child = _Child()
            try:
                return _image(*self._child.read(data))
            except ChildProcessError as error:
                reason = str(error)
            except OSError:  # the child has failed, not only the reader
                reason = "ends the process that reads it"
                self.close()
            if reason == _TOO_LONG:  # a second attempt would take just as long
                break
        raise InvalidArgumentError(f"cannot be read as an image: it {reason}", field="data")


class _Child:
    """The process that forks readers; the readers are in its process group."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair()
        self._control.settimeout(2 * WALL_LIMIT_S)
        with other:
            self._process = subprocess.Popen(
                python_command("gpu_worker.models.image_file_reader"),
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=bare_environment(),
                process_group=0,
            )

    def read(self, data: bytes) -> tuple[object, bytes]:
        """Return a new reader's response.

        Raises:
            ChildProcessError: The reader died, or its answer is invalid; the message says why.
            OSError: The child has ended, or does not respond.
        """
        answer: tuple[object, bytes] | None = None
        own, other = socket.socketpair()
        with own:
            own.settimeout(2 * WALL_LIMIT_S)
            with other:
                socket.send_fds(self._control, [b"\0"], [other.fileno()])
            with contextlib.suppress(OSError, ValueError, RecursionError):
                send(own, {}, data)
                answer = receive(own, _MAX_ANSWER_BYTES)
        code = self._control.recv(EXIT_CODE.size, socket.MSG_WAITALL)
        if len(code) < EXIT_CODE.size:
            raise ConnectionError("the child has ended")
        (number,) = EXIT_CODE.unpack(code)
        if -number in (signal.SIGPROF, signal.SIGALRM):
            raise ChildProcessError(_TOO_LONG)
        if number or answer is None:
            raise ChildProcessError(_CRASHES)
        return answer

    def end(self) -> None:
        """Kill the process and its readers."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _image(answer: object, pixels: bytes) -> Any:
    """Return the image in a reader's response, which may be anything if a file has compromised the reader. Raises
    InvalidArgumentError if the reader rejects the file, or ChildProcessError if the answer is invalid.
    """
    from PIL import Image

    match answer:
        case {"error": str(reason)}:
            raise InvalidArgumentError(reason[:_MAX_REASON], field="data")
        case {"width": int(width), "height": int(height)} if 0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE:
            if len(pixels) == 3 * width * height:
                return Image.frombytes("RGB", (width, height), pixels)
    raise ChildProcessError(_CRASHES)
