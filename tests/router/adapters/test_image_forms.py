"""The ways in which clients write an image in base64."""

from __future__ import annotations

import base64
import urllib.request
from typing import Any

import pytest
from transformers.image_utils import load_image

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.protocols.anthropic.request import read_messages
from router.protocols.contents import image_of_base64, image_of_url
from router.protocols.conversation import ChatModel
from router.protocols.fields import CHAT, ignored_fields
from router.protocols.openai.body import Body
from router.protocols.openai.jobs import Vocabulary, chat_job
from router.protocols.responses.request import read_response

DATA = bytes(range(256)) + b"\xfb\xff\xfe?"  # its base64 has +, / and padding
PLAIN = base64.b64encode(DATA).decode()
# A white pixel.
GIF = b"GIF89a\1\0\1\0\x80\0\0\xff\xff\xff\0\0\0!\xf9\4\0\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"


def lines(data: bytes, end: str = "\n") -> str:
    return base64.encodebytes(data).decode().replace("\n", end)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/gif;base64,{PLAIN}",
        f"DATA:image/gif;BASE64,{PLAIN}",
        f"Data:image/gif;name=a.gif;Base64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"data:image/gif; base64,{lines(DATA)}",
        f"data:image/gif;base64,{lines(DATA, chr(13) + chr(10))}",
        f"data:image/gif;base64,{PLAIN.rstrip('=')}",
        f"data:image/gif;base64,{PLAIN.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
    ],
    ids=["plain", "capitals", "parameter", "no_type", "lines", "crlf", "no_padding", "escaped"],
)
def test_a_data_url_is_read_in_every_form(url: str) -> None:
    assert image_of_url(url, "f") == DATA


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_forms_that_libraries_read(end: str) -> None:
    text = lines(GIF, end)
    assert load_image(f"data:image/gif;base64,{text}").size == (1, 1)
    assert image_of_url(f"data:image/gif;base64,{text}", "f") == GIF
    for url in (f"DATA:image/gif;base64,{PLAIN}", f"data:image/gif;base64,{PLAIN.replace('+', '%2B')}"):
        with urllib.request.urlopen(url) as opened:
            assert opened.read() == image_of_url(url, "f") == DATA


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:image/gif;base64,a", InvalidArgumentError),
        ("data:image/gif;base64,aaa=a", InvalidArgumentError),
        ("data:image/gif;base64,aa*a", InvalidArgumentError),
        ("data:image/gif;base64,aa%ffaa", InvalidArgumentError),
        ("data:image/gif;base64,aaaé", InvalidArgumentError),
        ("data:image/gif,aaaa", InvalidArgumentError),
        ("data:image/gif;base64x,aaaa", InvalidArgumentError),
        ("https://example.com/a.png", UnsupportedError),
        ("", UnsupportedError),
    ],
)
def test_other_urls_are_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        image_of_url(url, "f")


def test_base64_without_a_url() -> None:
    """In Anthropic's API."""
    assert image_of_base64(lines(DATA), "f") == DATA
    source = {"type": "base64", "media_type": "image/gif", "data": lines(GIF)}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    job = read_messages(Body({"messages": [turn], "max_tokens": 5}), ChatModel())
    assert job.conversation.request.chat.messages[0].parts[0].image.data == GIF


DETAILS: list[tuple[Any, bool]] = [
    ("auto", True), ("low", True), ("high", True), ("original", True), (None, True),
    ("best", False), (7, False), ("", False), ([], False),
]  # fmt: skip


@pytest.mark.parametrize(("detail", "is_known"), DETAILS)
def test_a_detail_is_one_of_openai_s_and_has_no_effect(detail: object, is_known: bool) -> None:
    url = f"data:image/gif;base64,{PLAIN}"
    seen = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    shown = {"type": "input_image", "image_url": url, "detail": detail}
    chat = Body({"messages": [{"role": "user", "content": [seen]}]})
    response = Body({"input": [{"role": "user", "content": [shown]}]})
    if is_known:
        chat_job(chat, Vocabulary(lambda _: b""))
        assert ignored_fields(chat, CHAT) == (["messages.content.image_url.detail"] if detail else [])
        assert read_response(response, ChatModel()).ignored == (["input.content.detail"] if detail else [])
        return
    with pytest.raises(InvalidArgumentError, match="auto, low, high, original") as raised:
        chat_job(chat, Vocabulary(lambda _: b""))
    assert raised.value.field == "messages[0].content[0].image_url.detail"
    with pytest.raises(InvalidArgumentError) as raised:
        read_response(response, ChatModel())
    assert raised.value.field == "input[0].content[0].detail"
