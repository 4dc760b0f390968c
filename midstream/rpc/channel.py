"""Client channels of gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from midstream.security.secure_channel import SecureChannel
from midstream.security.tls import Tls

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20

# The server allows pings twice as often (Limits.min_ping_interval_s); beyond that, it closes the connection.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Time limit for the reply to a ping; by default it is a minute, regardless of the keepalive timeout.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def open_channel(
    target: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: Tls | None = None,
    server_name: str = "",
    token: str = "",
    uses_proxy: bool = False,
) -> grpc.aio.Channel:
    """Return a channel with the keepalive that our servers expect, which reconnects within a second.

    Args:
        target: `host:port`, or `dns:///host:port` for all addresses of a name in turn.
        server_name: Name that the server's certificate must contain, if it differs from the target's.
        token: Bearer token to send with each call.
        uses_proxy: Whether to connect through the HTTP proxy that the environment names, if any.
    """
    options = channel_options(max_message_bytes, uses_proxy=uses_proxy)
    if tls is None:
        if not token:
            return grpc.aio.insecure_channel(target, options=options)
        return SecureChannel(lambda: grpc.aio.insecure_channel(target, options=options), lambda: 0, token)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return SecureChannel(
        lambda: grpc.aio.secure_channel(target, tls.channel_credentials(), options=options), tls.refresh, token
    )


def channel_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, *, uses_proxy: bool = False
) -> list[tuple[str, Any]]:
    """Return the options of every client channel, including synchronous ones."""
    return [
        *_KEEPALIVE,
        # By default, gRPC connects through http_proxy even to this machine.
        ("grpc.enable_http_proxy", int(uses_proxy)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A killed process is back within a second or two; clients would notice a longer wait.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),
        # Despite its name, this is the time limit for one attempt. It is long enough for TLS on a slow network or a
        # busy machine, and short enough for hosts that have disappeared without closing their connections.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        # A restarted process may have another address; by default, gRPC resolves a name at most once in 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", 250),
        # Each channel has its own backoff, even if several use the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.lb_policy_name", "round_robin"),
    ]
