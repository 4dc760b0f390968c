"""Public keys of receipts as JSON Web Keys (RFC 8037)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import ConfigError
from protos import receipts_pb2

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ReceiptKey:
    """A public key.

    Attributes:
        data: Its 32 bytes.
        created_unix_s: When the pair was made, in seconds since the Unix epoch.
    """

    data: bytes
    created_unix_s: int = 0

    @property
    def key_id(self) -> str:
        """The thumbprint of RFC 7638."""
        # The members are in the order that the thumbprint requires.
        text = f'{{"crv":"Ed25519","kty":"OKP","x":"{encode_base64url(self.data)}"}}'
        return encode_base64url(hashlib.sha256(text.encode()).digest())

    def to_jwk(self) -> dict[str, object]:
        """Return the JSON Web Key."""
        return {
            "kty": "OKP",
            "crv": "Ed25519",
            "use": "sig",
            "alg": "EdDSA",
            "kid": self.key_id,
            "x": encode_base64url(self.data),
            "iat": self.created_unix_s,
        }

    @classmethod
    def from_jwk(cls, jwk: Mapping[str, object], where: str) -> ReceiptKey:
        """Return the key. Members other than `kty`, `crv`, `x` and `iat` are ignored, as RFC 7517 requires. Raises
        ConfigError if it is not an Ed25519 key; the error names `where`.
        """
        created = jwk.get("iat", 0)
        if jwk.get("kty") != "OKP" or jwk.get("crv") != "Ed25519" or not isinstance(created, int):
            raise ConfigError(f"{where} contains no Ed25519 key", field="receipt_keys")
        return cls(decode_key(jwk.get("x"), where), created)

    def to_proto(self) -> receipts_pb2.ReceiptKey:
        """Return the message."""
        return receipts_pb2.ReceiptKey(key_id=self.key_id, public_key=self.data, created_unix_s=self.created_unix_s)

    @classmethod
    def from_proto(cls, message: receipts_pb2.ReceiptKey) -> ReceiptKey:
        """Build this from the protobuf message; its key_id is computed again."""
        return cls(message.public_key, message.created_unix_s)


def encode_base64url(data: bytes) -> str:
    """Return unpadded base64url."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_key(text: object, where: str) -> bytes:
    """Return the 32 bytes of a key in base64url. Raises ConfigError if it is none; the error names `where`."""
    try:
        data = base64.urlsafe_b64decode(f"{text}==") if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != _KEY_BYTES:
        raise ConfigError(f"{where} contains no key of {_KEY_BYTES} bytes", field="receipt_keys")
    return data
