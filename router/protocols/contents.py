"""The contents of a conversation's turns: texts, and images from the bodies of chat APIs."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.pipeline.images import images_of


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
    """Return the image file in a data URL. Raises InvalidArgumentError if the URL is not valid base64, or
    UnsupportedError if the image is somewhere else.
    """
    if not url.startswith("data:"):
        raise UnsupportedError("must be a data: URL with the image in base64; URLs are not fetched", field=field)
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise InvalidArgumentError("must be in base64: data:image/png;base64,...", field=field)
    return image_of_base64(data, field)


def image_of_base64(data: str, field: str) -> bytes:
    """Return the image file in `data`. Raises InvalidArgumentError if `data` is not valid base64."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidArgumentError("is not valid base64", field=field) from None
