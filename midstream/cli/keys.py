"""`midstream keys`: create a CURVE key pair for the scheduler or a worker."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from midstream.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="Base name of the key files, NAME.key and NAME.key_secret.")
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER", help="Output directory. [.]")


def run(arguments: argparse.Namespace) -> int:
    if not re.fullmatch(r"[\w.-]+", arguments.name):
        raise ConfigError("must be letters, digits, or . _ -", field="name")
    try:
        from midstream.security.curve import make_key_pair
    except ImportError as error:
        raise ConfigError(f"needs `pip install midstream[scheduler]` ({error})", field="keys") from None
    public, secret = make_key_pair(arguments.output, arguments.name)
    print(f"public key: {public}\nsecret key: {secret} (keep it on {arguments.name} only)")
    return 0
