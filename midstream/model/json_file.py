"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.git_lfs import refuse_pointer

_MAX_BYTES = 256 << 20


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the object in a file; an empty one if the file does not exist and is optional.

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
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise ConfigError(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return value
