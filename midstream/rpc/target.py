"""Validates gRPC targets, since gRPC would interpret a mistyped one as another address."""

from __future__ import annotations

import re
from urllib.parse import unquote

from midstream.config.service import MAX_PORT
from midstream.errors import InvalidArgumentError
from midstream.security.host_header import is_loopback

_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
_CONNECTION = re.compile(
    r"connect(?:ions)? to all (?:backends|addresses).*?last error: \w+: (?:ipv[46]:)?(\S+): (.*)", re.S
)
_RESOLVING = re.compile(r"(?:errors resolving|DNS resolution failed for) (?:dns:///)?([^\s:]+)")


def check_target(target: str) -> str:
    """Return `target` if it is HOST:PORT, or an address with a scheme that gRPC supports. Raises InvalidArgumentError
    if the target is a URL, or its port is missing or out of range.
    """
    if re.match("https?://", target):
        example = re.sub("^https?://([^/:]*).*", r"\1", target) or "HOST"
        raise InvalidArgumentError(
            f"{target!r} is a URL; give HOST:PORT with the gRPC port, such as {example}:50051", field="address"
        )
    if target.startswith(("unix:", "unix-abstract:")):
        return target
    name = target.removeprefix(next((scheme for scheme in _SCHEMES if target.startswith(scheme)), ""))
    host, _, port = name.rpartition(":")
    if not host.strip("/") or not port.isdigit() or host.endswith(":"):
        raise InvalidArgumentError(f"{target!r} lacks a port; give HOST:PORT, such as {target}:50051", field="address")
    if not 0 < int(port) <= MAX_PORT:
        raise InvalidArgumentError(f"{port} of {target!r} is not a port (1..{MAX_PORT})", field="address")
    return target


def is_local(target: str) -> bool:
    """Return whether a target that `check_target` accepts is on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    name = target.removeprefix(next((scheme for scheme in _SCHEMES if target.startswith(scheme)), ""))
    return is_loopback(name.rpartition(":")[0].strip("/").strip("[]"))


def plain_problem(details: str) -> str:
    """Return gRPC's message about a failed connection, reworded to say what to do."""
    found = _CONNECTION.search(details)
    if found is not None:
        address, problem = unquote(found[1]), found[2]
        if "refused" in problem:
            return f"nothing listens on {address}; is the service running, and is this its gRPC port?"
        if "HTTP/2" in problem or "http1" in problem:
            return f"the server at {address} does not speak gRPC; is it an HTTP port, or does it need TLS?"
        if "WRONG_VERSION_NUMBER" in problem:
            return f"the server at {address} does not use TLS; connect without it"
        return f"cannot connect to {address}: {problem}"
    found = _RESOLVING.search(details)
    if found is not None:
        return f"the host name {found[1]} cannot be resolved"
    return details
