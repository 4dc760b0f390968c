"""The process that reads image files: `python -m gpu_worker.models.image_file_reader`, with a socket as its input.

Its memory and its processor time for each file are limited, and it can open no files or sockets. Each message has a
file; the answer has the size of the image and its pixels in RGB, or an error. The process ends with its connection.
"""

from __future__ import annotations

import io
import resource
import signal
import socket
import warnings

from PIL import Image, UnidentifiedImageError

from gpu_worker.models.image_files import CPU_LIMIT_S, MAX_PIXELS, MAX_SIDE, MEMORY_BYTES
from midstream.socket_messages import receive, send

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def read_image(data: bytes) -> tuple[dict[str, object], bytes]:
    """Return the answer for a file: its `width` and `height` with the pixels, or an `error`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damage in metadata; the size is checked here
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                return {"error": f"has {width * height} pixels; must have at most {MAX_PIXELS}"}, b""
            if max(width, height) > MAX_SIDE:
                return {"error": f"has {width} x {height} pixels; each side must have at most {MAX_SIDE}"}, b""
            return {"width": width, "height": height}, image.convert("RGB").tobytes()
    except UnidentifiedImageError:
        return {"error": f"is not an image of the types {', '.join(FORMATS)}"}, b""
    except MemoryError:
        return {"error": "cannot be read as an image: it needs too much memory"}, b""
    except Exception as error:  # noqa: BLE001 (decoders raise anything for a damaged file)
        return {"error": f"cannot be read as an image: {str(error)[:200]}"}, b""


def _warm_up() -> None:
    """Have Pillow import now what it imports on first use, when files can no longer be opened."""
    Image.init()
    for kind in FORMATS:
        file = io.BytesIO()
        Image.new("P" if kind == "GIF" else "RGB", (1, 1)).save(file, kind)
        read_image(file.getvalue())


def main() -> None:
    """Answer messages until the connection ends."""
    connection = socket.socket(fileno=0)
    _warm_up()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # the connection is open already
    ):
        resource.setrlimit(limit, (value, value))
    while True:
        try:
            _, data = receive(connection)
        except OSError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        answer, pixels = read_image(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer, pixels)


if __name__ == "__main__":
    main()
