"""The process that forks readers of image files: `python -m gpu_worker.models.image_file_reader`, with a socket as
standard input.

Over this socket, it receives a connection for each file, forks a reader for it, and answers with the reader's exit
code. The reader responds with the size of the image and its pixels in RGB, or with an error, and exits. Its memory and
processor time are limited, and it cannot open files or sockets. The process exits when its input ends.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import socket
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from gpu_worker.models.image_files import CPU_LIMIT_S, EXIT_CODE, MAX_PIXELS, MAX_SIDE, MEMORY_BYTES, WALL_LIMIT_S
from midstream.socket_messages import receive, send

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "TIFF")


def read_image(data: bytes) -> tuple[dict[str, object], bytes]:
    """Return the answer for a file: its `width` and `height` with the pixels, or an `error`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about damaged metadata; the size is checked below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                return {"error": f"has {width * height} pixels; must have at most {MAX_PIXELS}"}, b""
            if max(width, height) > MAX_SIDE:
                return {"error": f"has {width} x {height} pixels; each side must have at most {MAX_SIDE}"}, b""
            pixels = _upright(image).convert("RGB")
            return {"width": pixels.width, "height": pixels.height}, pixels.tobytes()
    except UnidentifiedImageError:
        return {"error": f"is not an image of the types {', '.join(FORMATS)}"}, b""
    except MemoryError:
        return {"error": "cannot be read as an image: it needs too much memory"}, b""
    except Exception as error:  # noqa: BLE001 (decoders raise anything for a damaged file)
        return {"error": f"cannot be read as an image: {str(error)[:200]}"}, b""


def _upright(image: Image.Image) -> Image.Image:
    """Return an image as its EXIF orientation says that it is seen; damaged metadata are ignored."""
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (damaged metadata raise anything)
        return image


def _warm_up() -> None:
    """Import now what Pillow would import on first use, when files can no longer be opened."""
    Image.init()
    for kind in FORMATS:
        file = io.BytesIO()
        Image.new("P" if kind == "GIF" else "RGB", (1, 1)).save(file, kind)
        read_image(file.getvalue())


def _read_one(connection: socket.socket) -> None:
    """Read a file from `connection` and respond, in a new process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        # in addition to the timer, which code injected by a file could stop
        (resource.RLIMIT_CPU, math.ceil(CPU_LIMIT_S) + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # the connection is open already
    ):
        resource.setrlimit(limit, (value, value))
    _, data = receive(connection)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    send(connection, *read_image(data))


def _wait(pid: int) -> int:
    """Wait for a reader, kill it at the time limit, and return its exit code: that of SIGALRM if it was killed."""
    killed = []

    def kill(*_: object) -> None:
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return -signal.SIGALRM if killed else os.waitstatus_to_exitcode(status)


def main() -> None:
    """Fork a reader for each connection until the input ends."""
    control = socket.socket(fileno=0)
    _warm_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        pid = os.fork()
        if not pid:
            try:
                control.close()
                _read_one(socket.socket(fileno=descriptors[0]))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(descriptors[0])
        control.sendall(EXIT_CODE.pack(_wait(pid)))


if __name__ == "__main__":
    main()
