"""Certificates for tests, created with the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Identity:
    """Paths of a certificate and of its key."""

    cert: str
    key: str


class Authority:
    """A certificate authority in its own folder.

    Attributes:
        ca: Path of the certificate of the authority itself.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = str(folder / "ca.pem")
        self._key = str(folder / "ca.key")
        _openssl("req", "-x509", *_KEY, "-keyout", self._key, "-out", self.ca, "-subj", f"/CN={name}")

    def issue(self, name: str, *, hosts: str = "IP:127.0.0.1,DNS:localhost", part: str = "") -> Identity:
        """Issue a certificate for `name` and a kind of component; it replaces an earlier certificate for the same
        name.
        """
        if part:
            hosts = f"URI:spiffe://midstream/{part},{hosts}"
        request, key, cert, extensions = (
            str(self._folder / f"{name}.{kind}") for kind in ("csr", "key", "pem", "extensions")
        )
        Path(extensions).write_text(f"subjectAltName={hosts}\n", encoding="utf-8")
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial",
            "-out", cert, "-days", "2", "-extfile", extensions,
        )  # fmt: skip
        return Identity(cert, key)


def _openssl(*arguments: str) -> None:
    result = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
