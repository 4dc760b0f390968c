"""Resolves settings such as `a:1,b:2` or `dns:///name:port` to addresses, and follows changes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from midstream.errors import ConfigError

logger = logging.getLogger(__name__)

_DNS = "dns:///"
_INTERVAL_S = 1.0


class Discovery:
    """Keeps a set of `host:port` addresses up to date.

    Attributes:
        addresses: The current addresses, in the order of the setting.
    """

    def __init__(self, targets: str, *, field: str, on_change: Callable[[list[str]], None]) -> None:
        """Parse `targets`, comma-separated; `dns:///` names are resolved again every second.

        Args:
            targets: The setting.
            field: Name of the setting, for error messages.
            on_change: Called with the addresses after each change, including the first one.

        Raises:
            ConfigError: The setting is empty, or a target has no port.
        """
        self._targets = [target.strip() for target in targets.split(",") if target.strip()]
        self._on_change = on_change
        self.addresses: list[str] = []
        self._names: dict[str, str] = {}
        if not self._targets:
            raise ConfigError("must have at least one address", field=field)
        for target in self._targets:
            if not target.rpartition(":")[2].isdigit():
                raise ConfigError(f"{target!r} is not host:port", field=field)

    def name_of(self, address: str) -> str:
        """Return the host name that resolved to an address, which its certificate must contain; empty for the address
        itself.
        """
        return self._names.get(address, "")

    async def run(self) -> None:
        """Re-resolve names until cancelled; return immediately if there are no names."""
        while True:
            addresses = await self._resolve()
            if addresses != self.addresses:
                self.addresses = addresses
                self._on_change(addresses)
            if not any(target.startswith(_DNS) for target in self._targets):
                return
            await asyncio.sleep(_INTERVAL_S)

    async def _resolve(self) -> list[str]:
        found: dict[str, None] = {}  # used as an ordered set
        for target in self._targets:
            if not target.startswith(_DNS):
                found[target] = None
                continue
            host, _, port = target.removeprefix(_DNS).rpartition(":")
            loop = asyncio.get_running_loop()
            try:
                infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            except OSError as error:
                # The name has no addresses: the service is scaled to zero, or the resolver failed. Keep the previous
                # addresses.
                logger.warning("cannot resolve %s: %s", target, error)
                found.update(dict.fromkeys(self.addresses))
                continue
            for info in sorted(infos, key=lambda item: str(item[4][0])):
                ip = str(info[4][0])
                address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
                found[address] = None
                self._names[address] = host
        return list(found)
