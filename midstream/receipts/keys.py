"""Ed25519 keys that sign receipts, as JSON Web Keys (RFC 8037).

NAME.jwk_secret contains a key pair, and NAME.jwk only the public key. A folder may contain several: the pair that was
created last signs, and all public keys verify. A key is retired by deleting its NAME.jwk_secret.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from midstream.errors import ConfigError
from midstream.receipts.jwk import ReceiptKey, decode_key, encode_base64url

PUBLIC_SUFFIX, SECRET_SUFFIX = ".jwk", ".jwk_secret"
_CONTEXT = b"midstream receipt 1\0"
_MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key pair."""

    public: ReceiptKey
    secret: Ed25519PrivateKey = field(repr=False, compare=False)
    key_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_id", self.public.key_id)  # it takes as long as a receipt

    @classmethod
    def new(cls) -> SigningKey:
        """Return a new random pair."""
        secret = Ed25519PrivateKey.generate()
        return cls(ReceiptKey(secret.public_key().public_bytes_raw(), int(time.time())), secret)

    def sign(self, root: bytes) -> bytes:
        """Return the signature over the root of receipts."""
        return self.secret.sign(_CONTEXT + root)

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write NAME.jwk and NAME.jwk_secret; return their paths.

        Raises:
            ConfigError: The name exists.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        public, secret = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
        for path in (public, secret):
            if path.exists():
                raise ConfigError(f"{path} already exists", field="name")
        jwk = self.public.to_jwk()
        _write(public, jwk, 0o644)
        _write(secret, jwk | {"d": encode_base64url(self.secret.private_bytes_raw())}, 0o600)
        return public, secret


def has_signed(key: ReceiptKey, root: bytes, signature: bytes) -> bool:
    """Return whether the signature over the root of receipts was made with this key."""
    try:
        Ed25519PublicKey.from_public_bytes(key.data).verify(signature, _CONTEXT + root)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_public_key(path: Path) -> ReceiptKey:
    """Return the public key in NAME.jwk or NAME.jwk_secret. Raises ConfigError if there is none."""
    return ReceiptKey.from_jwk(_read(path), str(path))


def read_signing_key(path: Path) -> SigningKey:
    """Return the pair in NAME.jwk_secret. Raises ConfigError if it contains none, or its parts do not match."""
    jwk = _read(path)
    public = ReceiptKey.from_jwk(jwk, str(path))
    secret = Ed25519PrivateKey.from_private_bytes(decode_key(jwk.get("d"), str(path)))
    if secret.public_key().public_bytes_raw() != public.data:
        raise ConfigError(f"the keys in {path} do not match", field="receipt_keys")
    return SigningKey(public, secret)


def _write(path: Path, jwk: Mapping[str, object], mode: int) -> None:
    # Created with these permissions, so that no other user can ever read a secret key.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream:
        json.dump(jwk, stream, indent=2)
        stream.write("\n")


def _read(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as stream:
            jwk = json.loads(stream.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="receipt_keys") from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON", field="receipt_keys") from None
    if not isinstance(jwk, dict):
        raise ConfigError(f"{path} contains no key", field="receipt_keys")
    return jwk
