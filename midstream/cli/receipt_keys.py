"""Public keys in files, for the commands that check receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from midstream.errors import ConfigError
from midstream.receipts.jwk import ReceiptKey


def read_keys(path: Path) -> Mapping[str, ReceiptKey]:
    """Return the keys in a JSON Web Key Set or a single JSON Web Key, by id. Raises ConfigError if there are none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{path} is not JSON", field="keys") from None
    items = value.get("keys", [value]) if isinstance(value, dict) else []
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{path} contains no keys", field="keys")
    keys = [ReceiptKey.from_jwk(item, str(path)) for item in items]
    return {key.key_id: key for key in keys}
