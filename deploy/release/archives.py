"""Archives whose bytes depend only on the names, modes and contents of their files."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from pathlib import Path


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def repack(path: Path, time_s: int) -> None:
    """Write a .tar.gz again, in the order of its names, with one time, without owners, and with the modes 644 and 755.

    Raises:
        ValueError: The archive contains something other than files and folders.
    """
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda it: it.name):
            if not (member.isfile() or member.isdir()):
                raise ValueError(f"{path.name}: {member.name} is neither a file nor a folder")
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, time_s
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    packed.seek(0)
    write_gzip(packed, path)


def write_gzip(source: io.BufferedIOBase | io.BytesIO, target: Path) -> None:
    """Compress a stream into a file, without a time or a name in its header."""
    with target.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file:
        shutil.copyfileobj(source, file, 1 << 20)


def write_sums(folder: Path) -> Path:
    """Write SHA256SUMS over all files of a folder, as `sha256sum --check` reads it; return its path."""
    sums = folder / "SHA256SUMS"
    sums.unlink(missing_ok=True)
    lines = [f"{digest_of(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    sums.write_text("".join(lines), encoding="utf-8")
    return sums
