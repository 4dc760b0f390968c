"""Authentication of workers: CURVE on the worker port, with a list of public keys.

A worker without a key, with a wrong server key, or with a key that is not in the folder fails the handshake, so none of
its messages is processed. The folder is read at each handshake; removing a key prevents its worker from reconnecting.
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
        """Read the keys.

        Raises:
            ConfigError: A key is missing, empty or damaged.
        """
        if not secret_key:
            raise ConfigError("is empty, but curve is on", field="curve_secret_key")
        if not worker_keys:
            raise ConfigError("is empty, but curve is on", field="curve_worker_keys")
        self._pair = read_key_pair(secret_key, "curve_secret_key")
        self._folder = worker_keys
        self._signature = sign_folder(worker_keys, "curve_worker_keys")
        self._allowed = read_public_keys(worker_keys, "curve_worker_keys")

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> WorkerKeys | None:
        """Return the keys set in the configuration; None if the port accepts any worker. Raises ConfigError if settings
        conflict, or a key is invalid.
        """
        if config.curve:
            return cls(config.curve_secret_key, config.curve_worker_keys)
        for name in ("curve_secret_key", "curve_worker_keys"):
            if getattr(config, name):
                raise ConfigError("is given, but curve is off", field=name)
        return None

    def secure(self, context: zmq.asyncio.Context, socket: zmq.Socket[bytes]) -> AsyncioAuthenticator:
        """Enable CURVE on an unbound socket; stop the returned authenticator after closing the socket."""
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # Without this setting, a handshake would succeed when no authenticator is running.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a worker with this public key may connect."""
        try:
            signature = sign_folder(self._folder, "curve_worker_keys")
            if signature != self._signature:
                self._allowed = read_public_keys(self._folder, "curve_worker_keys")
                # set only after success: a failure may be temporary, such as too many open files
                self._signature = signature
                logger.info("loaded %d worker keys", len(self._allowed))
        except ConfigError as error:
            logger.warning("the worker keys on disk are invalid; keeping the old ones: %s", error)
        if key not in self._allowed:
            logger.warning("rejected a worker with an unknown key", extra={"public_key": key.decode("ascii")})
        return key in self._allowed
