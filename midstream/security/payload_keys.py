"""Keys that encrypt requests and answers at rest (AES-256-GCM), as JSON Web Keys (RFC 7518).

A folder contains one NAME.jwk_payload per key. The key that was made last encrypts, and all decrypt, so a key can be
deleted once everything that it has encrypted has expired.

A sealed text is: one byte, the version (1); 8 bytes of the key's id; 12 random bytes; the ciphertext with its tag. What
it belongs to is authenticated with it, so that no sealed text passes for another.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from midstream.errors import ConfigError

SUFFIX = ".jwk_payload"
_VERSION = b"\1"
_KEY_BYTES, _ID_BYTES, _NONCE_BYTES = 32, 8, 12
_HEAD_BYTES = len(_VERSION) + _ID_BYTES


@dataclass(frozen=True, slots=True)
class _Key:
    data: bytes = field(repr=False)
    created_unix_s: int

    @property
    def key_id(self) -> bytes:
        return hashlib.sha256(b"midstream payload key" + self.data).digest()[:_ID_BYTES]


class PayloadKeys:
    """The keys in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the keys. Raises ConfigError if there is none, or a file is not a key."""
        keys = [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
        if not keys:
            message = f"{folder} has no NAME{SUFFIX}; make one with `midstream keys --kind payload`"
            raise ConfigError(message, field="payload_keys")
        self._newest = max(keys, key=lambda key: (key.created_unix_s, key.key_id))
        self._ciphers = {key.key_id: AESGCM(key.data) for key in keys}

    def seal(self, data: bytes, belongs_to: str) -> bytes:
        """Encrypt data."""
        nonce = os.urandom(_NONCE_BYTES)
        key_id = self._newest.key_id
        return _VERSION + key_id + nonce + self._ciphers[key_id].encrypt(nonce, data, belongs_to.encode())

    def unseal(self, sealed: bytes, belongs_to: str) -> bytes | None:
        """Decrypt data; None if the key is missing, or the data was changed or belongs to something else."""
        cipher = self._ciphers.get(sealed[len(_VERSION) : _HEAD_BYTES])
        if cipher is None or not sealed.startswith(_VERSION):
            return None
        nonce, text = sealed[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], sealed[_HEAD_BYTES + _NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, text, belongs_to.encode())
        except (InvalidTag, ValueError):
            return None


def make_payload_key(folder: Path, name: str) -> Path:
    """Write a new key to NAME.jwk_payload, readable only by this user; return its path. Raises ConfigError if the name
    exists.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    text = base64.urlsafe_b64encode(os.urandom(_KEY_BYTES)).rstrip(b"=").decode()
    jwk = {"kty": "oct", "alg": "A256GCM", "k": text, "iat": int(time.time())}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} already exists", field="name") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(jwk, stream, indent=2)
        stream.write("\n")
    return path


def _read(path: Path) -> _Key:
    try:
        jwk = json.loads(path.read_text(encoding="utf-8"))
        data, created = base64.urlsafe_b64decode(f"{jwk['k']}=="), jwk.get("iat", 0)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="payload_keys") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        data, created = b"", 0
    if len(data) != _KEY_BYTES or not isinstance(created, int):
        raise ConfigError(f"{path} contains no key of {_KEY_BYTES} bytes", field="payload_keys")
    return _Key(data, created)
