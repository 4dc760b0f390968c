"""`midstream keys`: create a key pair for worker connections (CURVE) or for signing receipts (Ed25519), or a key that
encrypts stored requests and answers (AES).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from midstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="Base name of the key files: NAME.key and NAME.key_secret, or NAME.jwk and NAME.jwk_secret for receipts; "
        "NAME.jwk_payload for the payload.",
    )
    parser.add_argument(
        "--kind",
        choices=("workers", "receipts", "payload"),
        default="workers",
        help="Purpose: worker connections, signing receipts, or encrypting stored requests and answers. [workers]",
    )
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER", help="Output directory. [.]")


def run(arguments: argparse.Namespace) -> int:
    if not re.fullmatch(r"[\w.-]+", arguments.name):
        raise ConfigError("must be letters, digits, or . _ -", field="name")
    try:
        if arguments.kind == "payload":
            print(f"secret key: {_make_payload_key(arguments.output, arguments.name)} (keep it on the scheduler only)")
            return 0
        make = _make_receipt_keys if arguments.kind == "receipts" else _make_worker_keys
        public, secret = make(arguments.output, arguments.name)
    except ImportError as error:
        raise ConfigError(f"needs `pip install midstream[scheduler]` ({error})", field="keys") from None
    holder = arguments.name if arguments.kind == "workers" else "the scheduler"
    print(f"public key: {public}\nsecret key: {secret} (keep it on {holder} only)")
    return 0


def _make_worker_keys(folder: Path, name: str) -> tuple[Path, Path]:
    from midstream.security.curve import make_key_pair

    return make_key_pair(folder, name)


def _make_receipt_keys(folder: Path, name: str) -> tuple[Path, Path]:
    from midstream.receipts.keys import SigningKey

    return SigningKey.new().write(folder, name)


def _make_payload_key(folder: Path, name: str) -> Path:
    from midstream.security.payload_keys import make_payload_key

    return make_payload_key(folder, name)
