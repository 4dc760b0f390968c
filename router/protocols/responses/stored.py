"""Reads the body of a stored response, which an earlier release may have accepted although this one would refuse it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.protocols.conversation import ChatModel
from router.protocols.openai.body import Body
from router.protocols.responses.items import Item, input_items
from router.protocols.responses.request import ResponseJob, echo_of, read_response

logger = logging.getLogger(__name__)

_MAX_PATH = 128  # errors truncate the paths of unknown fields
_ENCRYPTED = "reasoning.encrypted_content"


def read_stored(fields: dict[str, object], model: ChatModel, context: Sequence[Item] = ()) -> ResponseJob:
    """Return the job of a body that was once accepted.

    Its prompt exists already, so the job only serves to read the output. Therefore, everything that this release
    refuses is left out, and the input is not converted again; the job still has all input items, and repeats all
    fields.

    Raises:
        MidstreamError: The body cannot be read even then.
    """
    try:
        return read_response(Body(fields), model, context)
    except (InvalidArgumentError, UnsupportedError) as error:
        logger.debug("a stored request body contains something that this release rejects: %s", error)
    left: dict[str, object] = json.loads(json.dumps({**fields, "input": "."}))
    while True:
        try:
            job = read_response(Body(left), model)
            break
        except (InvalidArgumentError, UnsupportedError) as error:
            if not _remove(left, error.field):
                raise
    body = Body(fields)
    include = body.get("include")
    job.items = [item.fields for item in input_items(body)]
    job.echo = echo_of(body)
    job.shows_hidden = isinstance(include, list) and _ENCRYPTED in include
    return job


def _remove(fields: dict[str, object], path: str) -> bool:
    """Remove the value at `path`, or else the innermost value that would contain it; return whether one was found."""
    values = list(_values(fields, ""))
    exact = [value for value in values if path in (value[0], value[0][:_MAX_PATH])]
    around = [value for value in values if path.startswith((f"{value[0]}.", f"{value[0]}["))]
    for _, remove in exact[:1] or sorted(around, key=lambda value: len(value[0]))[-1:]:
        remove()
        return True
    return False


def _values(value: object, prefix: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the path of every value inside `value`, with a callable that removes it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield prefix + key, partial(value.pop, key)
            yield from _values(item, f"{prefix}{key}.")
    elif isinstance(value, list):
        outer = prefix.removesuffix(".")
        for index, item in enumerate(value):
            yield f"{outer}[{index}]", partial(value.pop, index)
            yield from _values(item, f"{outer}[{index}].")
