"""API keys of a service on this machine: `midstream up --api-key KEY`.

Keys are passed in a file in the run directory, because all users of the machine can read command lines. Commands that
find the service by its run directory read their own key there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from midstream.cli.run_dir import RunDir
from midstream.errors import ConfigError

# The minimum length that routers accept.
_MIN_CHARACTERS = 16


def use_api_keys(run_dir: RunDir, keys: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Write `keys` to the file that routers read, plus one key for this user's commands.

    Returns:
        The variables that make routers require a key; empty if there are no keys.

    Raises:
        ConfigError: A key cannot be sent as a bearer token, or the environment already configures authentication.
    """
    if not keys:
        # A detached service starts with the variables that its parent command has set here.
        if environment.get("MIDSTREAM_AUTH_TOKENS") != str(run_dir.api_keys):
            for path in (run_dir.api_keys, run_dir.token):
                path.unlink(missing_ok=True)
        return {}
    if environment.get("MIDSTREAM_AUTH_TOKENS") or environment.get("MIDSTREAM_AUTH", "token") != "token":
        raise ConfigError(
            "MIDSTREAM_AUTH and MIDSTREAM_AUTH_TOKENS already configure authentication", field="--api-key"
        )
    lines = []
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key or key[0] == "#":
            raise ConfigError(
                f"a key must have at least {_MIN_CHARACTERS} ASCII characters and no spaces; `openssl rand -hex 24` "
                "creates one",
                field="--api-key",
            )
        lines.append(f"{key} client-{number}")
    own = secrets.token_urlsafe(32)
    lines.append(f"{own} local generate,observe,admin")
    _write(run_dir.api_keys, "\n".join(lines))
    _write(run_dir.token, own)
    return {"MIDSTREAM_AUTH": "token", "MIDSTREAM_AUTH_TOKENS": str(run_dir.api_keys)}


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text + "\n")
