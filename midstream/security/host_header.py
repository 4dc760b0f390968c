"""Checks which Host headers an HTTP port accepts.

A malicious page can make its host name resolve to a loopback address (DNS rebinding), so that a browser sends the
page's requests to a local port. Such requests carry the page's host name.
"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """The Host headers that a port accepts."""

    def __init__(self, bound: str, names: str = "") -> None:
        """Accept this machine's names if `bound` is a loopback address, otherwise any name.

        Args:
            bound: The address on which the port listens.
            names: Comma-separated names to accept instead; `*` accepts all.
        """
        listed = {name.strip().lower() for name in names.split(",") if name.strip()}
        self._names = listed
        self._allows_all = "*" in listed or (not listed and not is_loopback(bound))

    def include(self, header: str) -> bool:
        """Return whether to accept a Host header; an empty one is accepted, since browsers always send one."""
        if self._allows_all or not header:
            return True
        host = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
        host = host.strip("[]").lower()
        return host in self._names or is_loopback(host)
