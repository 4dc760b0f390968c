"""The contents of a conversation's turns: texts, and images from the bodies of chat APIs."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.pipeline.images import images_of
from router.protocols.openai.body import Body

_BASE64 = re.compile(r"; *base64$", re.IGNORECASE)
_NO_SPACE = dict.fromkeys(map(ord, " \t\n\f\r"))
_DETAILS = ("auto", "low", "high", "original")


def add_text(turn: pb.ChatMessage, text: str) -> None:
    """Append a text to a turn, as a part of its own: the chat template decides how parts are joined."""
    turn.parts.add(text=text)


def add_image(turn: pb.ChatMessage, data: bytes) -> None:
    """Append an image to a turn."""
    turn.parts.add(image=pb.Image(data=data))


def image_names(request: pb.GenerateRequest, fields: Sequence[str]) -> dict[str, str]:
    """Return the client's names for the native fields of a request's images, given the field of each image."""
    return {native: sent for (native, _), sent in zip(images_of(request), fields, strict=True)}


def image_of_url(url: str, field: str) -> bytes:
    """Return the image file in a data URL, in the forms that browsers read: any case, other parameters, and escapes.
    Raises InvalidArgumentError if the URL is not valid base64, or UnsupportedError if the image is somewhere else.
    """
    if url[:5].lower() != "data:":
        raise UnsupportedError("must be a data: URL with the image in base64; URLs are not fetched", field=field)
    head, _, data = url.partition(",")
    if not _BASE64.search(head):
        raise InvalidArgumentError("must be in base64: data:image/png;base64,...", field=field)
    return image_of_base64(unquote_to_bytes(data).decode("latin-1") if "%" in data else data, field)


def image_of_base64(data: str, field: str) -> bytes:
    """Return the image file in `data`, which may have line breaks and other white space, and need not be padded. Raises
    InvalidArgumentError if `data` is not valid base64.
    """
    plain = data.translate(_NO_SPACE)
    if len(plain) % 4 and not plain.endswith("="):
        plain += "=" * (-len(plain) % 4)
    try:
        return base64.b64decode(plain, validate=True)
    except ValueError:
        raise InvalidArgumentError("is not valid base64", field=field) from None


def check_detail(image: Body) -> None:
    """Raise InvalidArgumentError if an image's level of detail, which has no effect, is not one of OpenAI's."""
    detail = image.fields.get("detail")  # not marked as read, so that it is listed as ignored
    if detail is not None and detail not in _DETAILS:
        raise InvalidArgumentError(f"must be one of {', '.join(_DETAILS)}", field=image.path("detail"))
