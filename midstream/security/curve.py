"""CURVE keys for the connection between scheduler and workers, in the file format of ZeroMQ's own tools.

NAME.key_secret contains a key pair, and NAME.key only the public key. The scheduler has its own pair and a folder with
the public keys of the workers that may connect; a worker has its own pair and the scheduler's public key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.security.file_signature import Signature, signature_of

_KEY_BYTES = 32
_MAX_FILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and a secret key, as Z85 text."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class WorkerCredentials:
    """A worker's credentials: its own key pair and the scheduler's public key."""

    own: KeyPair
    server_key: bytes

    @classmethod
    def from_config(cls, config: WorkerConfig) -> WorkerCredentials | None:
        """Return the configured credentials; None for plain text. Raises ConfigError if they cannot be used."""
        names = ("curve_secret_key", "curve_server_key")
        for name in names:
            if bool(getattr(config, name)) != config.curve:
                raise ConfigError(
                    "is empty, but curve is on" if config.curve else "is given, but curve is off", field=name
                )
        if not config.curve:
            return None
        own = read_key_pair(config.curve_secret_key, names[0])
        return cls(own, read_public_key(config.curve_server_key, names[1]))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys on an unconnected socket."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


def make_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Create a key pair; return the paths of the public key and the pair. Raises ConfigError if the name exists."""
    folder.mkdir(parents=True, exist_ok=True)
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise ConfigError(f"{path} already exists", field="name")
    # The file is created with private permissions, so that no other user can ever read the secret key.
    mask = os.umask(0o077)
    try:
        zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(mask)
    public.chmod(0o644)
    return public, secret


def read_key_pair(path: str, field: str) -> KeyPair:
    """Return the key pair in a file.

    Raises:
        ConfigError: The file is missing or empty, or contains no key pair; the error names `field`.
    """
    public, secret = _read(path, field)
    if secret is None:
        raise ConfigError(f"{path} contains no secret key", field=field)
    _check(secret, path, field)
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"the keys in {path} do not match", field=field)
    return KeyPair(public, secret)


def read_public_key(path: str, field: str) -> bytes:
    """Return the public key in a file.

    Raises:
        ConfigError: The file is missing or empty, or contains no key; the error names `field`.
    """
    return _read(path, field)[0]


def read_public_keys(folder: str, field: str) -> frozenset[bytes]:
    """Return the public keys in the files *.key of a folder.

    Raises:
        ConfigError: The folder is missing or empty, or contains a damaged file; the error names `field`.
    """
    keys = frozenset(read_public_key(str(path), field) for path in _key_files(folder, field))
    if not keys:
        raise ConfigError(f"{folder} contains no file NAME.key, so no worker could connect", field=field)
    return keys


def sign_folder(folder: str, field: str) -> tuple[tuple[str, Signature], ...]:
    """Return a value that changes whenever a folder's keys change or become readable.

    Raises:
        ConfigError: The folder cannot be read.
    """
    try:
        return tuple((path.name, signature_of(path.stat())) for path in _key_files(folder, field))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", field=field) from None


def _key_files(folder: str, field: str) -> Iterator[Path]:
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder!r} is not a folder", field=field)
    yield from sorted(Path(folder).glob("*.key"))


def _read(path: str, field: str) -> tuple[bytes, bytes | None]:
    try:
        if Path(path).stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is not a key file", field=field)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} cannot be used: {error}", field=field) from None
    _check(public, path, field)
    return public, secret


def _check(key: bytes, path: str, field: str) -> None:
    try:
        decoded = z85.decode(key)
    except Exception:  # noqa: BLE001 (it fails in many ways)
        decoded = b""
    if len(decoded) != _KEY_BYTES or not any(decoded):
        raise ConfigError(f"{path} contains an empty or damaged key", field=field)
