"""Which workers may connect: CURVE on the worker port, with a list of public keys.

A worker without a key, with another's server key, or with a key that is not in the folder does not get through the
handshake, so none of its messages is ever seen. The folder is looked at at each handshake; taking a key away keeps its
worker from connecting again.
"""

from __future__ import annotations

import logging

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from midstream.config import SchedulerConfig
from midstream.errors import ConfigError
from midstream.security.curve import read_key_pair, read_public_keys, sign_folder

logger = logging.getLogger(__name__)

_DOMAIN = "midstream"


class WorkerKeys:
    """The scheduler's key pair and the workers' public keys."""

    def __init__(self, secret_key: str, worker_keys: str) -> None:
        """Reads them.

        Args:
            secret_key: File with the scheduler's pair.
            worker_keys: Folder with the workers' public keys.

        Raises:
            ConfigError: A key is missing, empty or damaged.
        """
        if not secret_key:
            raise ConfigError("is empty, and curve is on", field="curve_secret_key")
        if not worker_keys:
            raise ConfigError("is empty, and curve is on", field="curve_worker_keys")
        self._pair = read_key_pair(secret_key, "curve_secret_key")
        self._folder = worker_keys
        self._signature = sign_folder(worker_keys, "curve_worker_keys")
        self._allowed = read_public_keys(worker_keys, "curve_worker_keys")

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> WorkerKeys | None:
        """What the configuration asks for; None is a port that is open to all who reach it.

        Raises:
            ConfigError: It contradicts itself, or a key cannot be used.
        """
        if config.curve:
            return cls(config.curve_secret_key, config.curve_worker_keys)
        for name in ("curve_secret_key", "curve_worker_keys"):
            if getattr(config, name):
                raise ConfigError("is given, and curve is off", field=name)
        return None

    def secure(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> AsyncioAuthenticator:
        """Puts a socket that is not bound yet behind the keys; stop what comes back after the socket is closed."""
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # Without this a handshake that finds nobody to ask would pass.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a worker with this public key may connect."""
        try:
            signature = sign_folder(self._folder, "curve_worker_keys")
            if signature != self._signature:
                self._signature = signature
                self._allowed = read_public_keys(self._folder, "curve_worker_keys")
                logger.info("took %d workers' keys", len(self._allowed))
        except ConfigError as error:
            logger.warning("the workers' keys on disk are not usable, so the old ones stay: %s", error)
        if key not in self._allowed:
            logger.warning("refused a worker whose key is not known", extra={"public_key": key.decode("ascii")})
        return key in self._allowed
