"""Which Host headers an HTTP port answers.

A page of another site can have its name resolve to a loopback address (DNS rebinding), so that a browser sends its
requests to a port that only this machine reaches. They carry that name.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of this machine alone."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """Host headers that are answered."""

    def __init__(self, bound: str, names: str = "") -> None:
        """Take the names of this machine where `bound`, the listening address, is a loopback one; any name elsewhere.

        Args:
            bound: What the port listens on.
            names: Comma-separated names that are allowed as well; `*` allows all. Where there are some, no others are.
        """
        listed = {name.strip().lower() for name in names.split(",") if name.strip()}
        self._names = listed
        self._allows_all = "*" in listed or (not listed and not is_loopback(bound))

    def include(self, header: str) -> bool:
        """Return whether a request with this Host header is answered; an empty one is no browser's."""
        if self._allows_all or not header:
            return True
        host = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
        host = host.strip("[]").lower()
        return host in self._names or is_loopback(host)
