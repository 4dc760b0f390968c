"""`midstream certificates`: create a CA, and certificates signed by it for services and clients."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

from midstream.errors import ConfigError, ExecutionError

PARTS = ("router", "scheduler", "detokenizer")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help=f"Names to issue certificates for: {', '.join(PARTS)} are services; any other name is a client.",
    )
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER", help="Output directory. [.]")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="Host name or address of a service; repeatable. [localhost, 127.0.0.1]",
    )
    parser.add_argument("--days", type=int, default=365, metavar="N", help="Validity in days. [365]")


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.names:
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ConfigError("must be 1 to 64 letters, digits, or . _ -", field="NAME")
        if name == "ca":
            raise ConfigError("ca is the authority, which is created automatically; choose another name", field="NAME")
    if shutil.which("openssl") is None:
        raise ConfigError("the openssl program is required; install it", field="certificates")
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    days = str(arguments.days)
    if not (folder / "ca.pem").exists():
        _openssl(folder, "req", "-x509", *_NEW_KEY, "-days", days, "-keyout", "ca.key", "-out", "ca.pem",
                 "-subj", "/CN=midstream authority")  # fmt: skip
    for name in arguments.names:
        _issue(folder, name, arguments.host or ["localhost", "127.0.0.1"], days)
    print(f"authority: {folder / 'ca.pem'} (keep its key, ca.key, secret, since it signs other certificates)")
    for name in arguments.names:
        print(f"{name}: {folder / name}.pem and {folder / name}.key")
    return 0


def extensions(name: str, hosts: list[str]) -> str:
    """Return a certificate's extensions in openssl's configuration format."""
    usage = "clientAuth"
    names = f"DNS:{name}.client"
    if name in PARTS:
        usage = "serverAuth,clientAuth"
        alternatives = [f"{'IP' if re.fullmatch(r'[0-9.]+|.*:.*', host) else 'DNS'}:{host}" for host in hosts]
        names = ",".join([f"URI:spiffe://midstream/{name}", f"DNS:{name}", *alternatives])
    return f"basicConstraints=critical,CA:FALSE\nextendedKeyUsage={usage}\nsubjectAltName={names}\n"


def _issue(folder: Path, name: str, hosts: list[str], days: str) -> None:
    text = folder / f"{name}.extensions"
    text.write_text(extensions(name, hosts), encoding="utf-8")
    try:
        _openssl(folder, "req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        _openssl(folder, "x509", "-req", "-sha256", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                 "-CAcreateserial", "-out", f"{name}.pem", "-days", days, "-extfile", text.name)  # fmt: skip
    finally:
        text.unlink()
        (folder / f"{name}.csr").unlink(missing_ok=True)


def _openssl(folder: Path, *arguments: str) -> None:
    # Only the owner may read keys.
    command = ["openssl", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, umask=0o077)
    if done.returncode != 0:
        raise ExecutionError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
