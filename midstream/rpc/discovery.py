"""Resolves settings to addresses, and follows changes.

A setting is a comma-separated list of targets:

- `host:port`: one address
- `dns:///name:port`: all addresses of a name
- `one-of:TARGET|TARGET`: of the addresses of all these targets, the one that is serving; the others are standbys
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from midstream.errors import ConfigError

logger = logging.getLogger(__name__)

_DNS = "dns:///"
_ONE_OF = "one-of:"
_INTERVAL_S = 1.0

IsServing = Callable[[str, str], Awaitable[bool]]


class Discovery:
    """Keeps a set of `host:port` addresses up to date.

    Attributes:
        addresses: The current addresses, in the order of the setting.
    """

    def __init__(
        self, targets: str, *, field: str, on_change: Callable[[list[str]], None], is_serving: IsServing | None = None
    ) -> None:
        """Parse the setting. Names are resolved, and standbys checked, again every second.

        Args:
            targets: The setting.
            field: Name of the setting, for error messages.
            on_change: Called with the addresses after each change, including the first one.
            is_serving: Returns whether an address is serving, given its host name; None if there are no standbys.

        Raises:
            ConfigError: The setting is empty, or a target has no port.
        """
        self._targets = [target.strip() for target in targets.split(",") if target.strip()]
        self._on_change = on_change
        self._is_serving = is_serving
        self.addresses: list[str] = []
        self._names: dict[str, str] = {}
        self._active: dict[str, _Active] = {}
        self._last: dict[str, list[str]] = {}  # addresses by DNS target, at its last resolution
        if not self._targets:
            raise ConfigError("must have at least one address", field=field)
        for target in self._targets:
            if target.startswith(_ONE_OF):
                if is_serving is None:
                    raise ConfigError("cannot contain one-of: all addresses are used", field=field)
                self._active[target] = _Active()
            for one in _alternatives(target):
                if not one.rpartition(":")[2].isdigit():
                    raise ConfigError(f"{one!r} is not host:port", field=field)

    def name_of(self, address: str) -> str:
        """Return the host name that resolved to an address, which its certificate must contain; empty for the address
        itself.
        """
        return self._names.get(address, "")

    async def run(self) -> None:
        """Follow changes until cancelled; return immediately if there can be none."""
        while True:
            addresses = await self._resolve()
            if addresses != self.addresses:
                self.addresses = addresses
                self._on_change(addresses)
            if not any(target.startswith((_DNS, _ONE_OF)) for target in self._targets):
                return
            await asyncio.sleep(_INTERVAL_S)

    async def _resolve(self) -> list[str]:
        found: dict[str, None] = {}  # used as an ordered set
        for target in self._targets:
            addresses = [address for one in _alternatives(target) for address in await self._addresses_of(one)]
            if target in self._active:
                address = await self._choose(self._active[target], addresses)
                addresses = [address] if address else []
            found.update(dict.fromkeys(addresses))
        return list(found)

    async def _addresses_of(self, target: str) -> list[str]:
        if not target.startswith(_DNS):
            return [target]
        host, _, port = target.removeprefix(_DNS).rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            # The name has no addresses: the service is scaled to zero, or the resolver failed.
            logger.warning("cannot resolve %s: %s", target, error)
            return self._last.get(target, [])
        addresses = []
        for info in sorted(infos, key=lambda item: str(item[4][0])):
            ip = str(info[4][0])
            address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
            addresses.append(address)
            self._names[address] = host
        self._last[target] = addresses
        return addresses

    async def _choose(self, active: _Active, addresses: list[str]) -> str:
        assert self._is_serving is not None
        checks = (self._is_serving(address, self.name_of(address)) for address in addresses)
        return active.update(dict(zip(addresses, await asyncio.gather(*checks), strict=True)))


class _Active:
    """The serving one of several addresses."""

    def __init__(self) -> None:
        self._address = ""
        self._serving_since: dict[str, int] = {}
        self._num_updates = 0

    def update(self, serving: dict[str, bool]) -> str:
        """Return the address that is serving now; if none is, the last one, or an empty string.

        Of several, it is the one that began last: the other one has lost the lease, but may not know this yet.
        """
        self._num_updates += 1
        for address, is_serving in serving.items():
            if not is_serving:
                self._serving_since.pop(address, None)
            elif address not in self._serving_since:
                self._serving_since[address] = self._num_updates
        since = {address: began for address, began in self._serving_since.items() if address in serving}
        self._serving_since = since
        if since:
            self._address = max(since, key=lambda address: (since[address], address == self._address))
        return self._address


def _alternatives(target: str) -> list[str]:
    if not target.startswith(_ONE_OF):
        return [target]
    return [one.strip() for one in target.removeprefix(_ONE_OF).split("|")]
