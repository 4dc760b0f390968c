"""Credentials for commands that use a service that requires certificates or a token."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypedDict

from midstream.cli.run_dir import RunDir
from midstream.config import API_KEY_VARIABLE
from midstream.config.loading import TRUE_WORDS
from midstream.errors import ConfigError
from midstream.security.tls import Tls


class Credentials(TypedDict):
    """The credential arguments of `AsyncClient` and `open_channel`."""

    tls: Tls | None
    server_name: str
    token: str


def add_credentials(parser: argparse._ActionsContainer) -> None:
    """Add the credential flags; their defaults come from the variables that services use."""
    parser.add_argument("--tls", action=argparse.BooleanOptionalAction, default=None, help="Use TLS. [MIDSTREAM_TLS]")
    for name, text in (
        ("tls-ca", "CA certificates with which to verify the routers' certificates."),
        ("tls-cert", "Client certificate."),
        ("tls-key", "Private key of the client certificate."),
        ("token-file", "File with the API key or other bearer token, instead of MIDSTREAM_API_KEY."),
    ):
        variable = "MIDSTREAM_" + name.replace("-", "_").upper()
        parser.add_argument(
            f"--{name}", default=os.environ.get(variable, ""), metavar="FILE", help=f"{text} [{variable}]"
        )
    parser.add_argument(
        "--server-name",
        default="",
        metavar="NAME",
        help="Server name expected in the routers' certificates. [the address]",
    )


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Return the credentials given by the flags. Without a token file, the token is that of the service in the run
    directory, if no address is given, or MIDSTREAM_API_KEY. Raises ConfigError if a file cannot be used.
    """
    is_on = arguments.tls
    if is_on is None:
        is_on = os.environ.get("MIDSTREAM_TLS", "").lower() in TRUE_WORDS
        for name in ("tls_cert", "tls_key", "tls_ca"):
            if getattr(arguments, name) and not is_on:  # a token would be sent in plain text
                raise ConfigError("is given, but TLS is off; add --tls", field=f"--{name.replace('_', '-')}")
    tls = Tls(arguments.tls_cert, arguments.tls_key, arguments.tls_ca) if is_on else None
    token_file = arguments.token_file
    if not token_file and not getattr(arguments, "address", None) and "run_dir" in arguments:
        own = RunDir(arguments.run_dir).token
        token_file = str(own) if own.exists() else ""
    token = _read_token(token_file) or os.environ.get(API_KEY_VARIABLE, "")
    return Credentials(tls=tls, server_name=arguments.server_name, token=token)


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="token_file") from None
    if not token or len(token.split()) > 1:
        raise ConfigError(f"{path} must contain exactly one token", field="token_file")
    return token
