"""Images over HTTP: ask about a picture. Needs a model that reads images, such as SmolVLM; other models refuse it.

midstream serve HuggingFaceTB/SmolVLM-256M-Instruct
"""

from __future__ import annotations

import base64
import os
import struct
import sys
import zlib

import openai


def red_square(size: int = 64) -> bytes:
    """Return a picture in PNG's format."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff\0\0" * size) * size
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    picture = "data:image/png;base64," + base64.b64encode(red_square()).decode()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        try:
            answer = client.chat.completions.create(
                model=model,
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": picture}},
                            {"type": "text", "text": "Which colour is this?"},
                        ],
                    }
                ],
                max_tokens=16,
                temperature=0,
            )
        except openai.APIStatusError as refused:
            print(f"refused: {refused.message}")
        else:
            print(f"answer: {answer.choices[0].message.content}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except openai.OpenAIError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
