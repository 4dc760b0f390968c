"""Resolves settings to addresses, and follows changes.

A setting is a comma-separated list of targets:

- `host:port`: one address
- `dns:///name:port`: all addresses of a name
- `one-of:TARGET|TARGET`: the address of the active scheduler among these targets; the others are standbys
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

GetEpoch = Callable[[str, str], Awaitable[int]]


class Discovery:
    """Keeps a set of `host:port` addresses up to date."""

    def __init__(
        self, targets: str, *, field: str, on_change: Callable[[list[str]], None], get_epoch: GetEpoch | None = None
    ) -> None:
        """Parse the setting. Every second, names are resolved and standbys are checked again.

        Args:
            field: Name of the setting, for error messages.
            on_change: Called with the addresses after each change, including the first one.
            get_epoch: Returns the epoch of the scheduler at an address, given its host name; 0 if it is not active.
                None if there are no standbys.

        Raises:
            ConfigError: The setting is empty, or a target has no port.
        """
        self._targets = [target.strip() for target in targets.split(",") if target.strip()]
        self._on_change = on_change
        self._get_epoch = get_epoch
        self.addresses: list[str] = []
        self._names: dict[str, str] = {}
        self._active: dict[str, _Active] = {}
        self._last: dict[str, list[str]] = {}  # addresses by DNS target, at its last resolution
        if not self._targets:
            raise ConfigError("must have at least one address", field=field)
        for target in self._targets:
            if target.startswith(_ONE_OF):
                if get_epoch is None:
                    raise ConfigError("cannot contain one-of: all addresses are used", field=field)
                self._active[target] = _Active()
            for one in _alternatives(target):
                if not one.rpartition(":")[2].isdigit():
                    raise ConfigError(f"{one!r} is not host:port", field=field)

    def name_of(self, address: str) -> str:
        """Return the host name that an address was resolved from, which its certificate must contain; empty if none."""
        return self._names.get(address, "")

    def target_of(self, address: str) -> str:
        """Return the `one-of:` target that an address stands for; the address itself for other targets."""
        return next((target for target, active in self._active.items() if active.address == address), address)

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
        assert self._get_epoch is not None
        epochs = await asyncio.gather(*(self._get_epoch(address, self.name_of(address)) for address in addresses))
        active.update(dict(zip(addresses, epochs, strict=True)))
        return active.address


class _Active:
    """Tracks which of several schedulers is active.

    Attributes:
        address: Address of the active scheduler. If none is active, that of the last active one; if none ever was
            active, that of any standby, so that the scheduler counts as unreachable rather than as absent.
    """

    def __init__(self) -> None:
        self.address = ""
        self._epoch = 0

    def update(self, epochs: dict[str, int]) -> None:
        """Update with the epoch of each address.

        Each scheduler that takes over has a higher epoch than the ones before, so a scheduler with a lower one has lost
        its lease, although it may not know this yet.
        """
        epoch, address = max(((epoch, address) for address, epoch in epochs.items()), default=(0, ""))
        if epoch > 0 and epoch >= self._epoch:
            self._epoch, self.address = epoch, address
        elif not self.address:
            self.address = next(iter(epochs), "")


def _alternatives(target: str) -> list[str]:
    if not target.startswith(_ONE_OF):
        return [target]
    return [one.strip() for one in target.removeprefix(_ONE_OF).split("|")]
