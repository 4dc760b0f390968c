"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.git_lfs import refuse_pointer

_MAX_BYTES = 256 << 20


def read_json(path: Path, *, optional: bool = False, until: str = "") -> dict[str, Any]:
    """Return the object in a file; an empty one if the file does not exist and is optional.

    Args:
        path: The file.
        optional: Whether the file may be missing.
        until: Return only the fields before this one, whose value and what follows it are not read.

    Raises:
        ConfigError: The file is missing, too large, or not a JSON object.
    """
    if not path.is_file():
        if optional:
            return {}
        raise ConfigError(f"the model folder {path.parent} lacks {path.name}", field="model")
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path} is too large", field="model")
    try:
        text = path.read_bytes().decode()
        value = _fields_until(text, until) if until else json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise ConfigError(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return value


def _fields_until(text: str, last: str) -> Any:
    """Decode the fields of an object that are before the field `last`; the whole text if there is none."""
    decode, fields, place = json.JSONDecoder().raw_decode, dict[str, Any](), 0
    while match := _NEXT_KEY.match(text, place):
        key, place = decode(text, match.end())
        colon = _COLON.match(text, place)
        if not isinstance(key, str) or colon is None:
            break
        if key == last:
            return fields
        fields[key], place = decode(text, colon.end())
    return json.loads(text)


_NEXT_KEY, _COLON = re.compile(r"\s*[{,]\s*(?=\")"), re.compile(r"\s*:\s*")
