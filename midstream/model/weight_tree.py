"""The Merkle tree over a model's configuration and weights, which identifies every byte of them.

Leaves are the SHA-256 of pieces of 1 MiB; the last leaf of a file may be shorter, and an empty file has one empty leaf.

    leaf  = SHA-256(0x00, piece)
    file  = SHA-256(0x02, length of the name (8 bytes, little-endian), name, size (8 bytes, little-endian), its root)
    root  = the tree over the files, config.json first, then the weights by name

The nodes are those of midstream/merkle.py. The leaves are stored next to the model in midstream.tree.json, or in
$MIDSTREAM_HOME/trees if the folder is read-only or in the cache of the Hub, with each file's size and times. A file
whose size or times differ is hashed again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.errors import ConfigError
from midstream.merkle import merkle_root
from midstream.model.folder import ModelFolder, midstream_home
from midstream.model.hub import repository_of
from midstream.model.json_file import read_json

LEAF_BYTES = 1 << 20
_VERSION = 1
_NAME = "midstream.tree.json"
_LEAF, _FILE = b"\0", b"\2"
_HASH_BYTES = 32


# Name, size, and times of change.
_Facts = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class FileTree:
    """The leaves of one file, and the file's size and times when it was hashed."""

    name: str
    size: int
    modified_ns: int
    changed_ns: int
    leaves: bytes

    @property
    def root(self) -> bytes:
        """The root over the leaves."""
        return merkle_root(
            [self.leaves[start : start + _HASH_BYTES] for start in range(0, len(self.leaves), _HASH_BYTES)]
        )

    @property
    def digest(self) -> bytes:
        """The file's leaf in the tree over the files."""
        name = self.name.encode()
        head = _FILE + len(name).to_bytes(8, "little") + name + self.size.to_bytes(8, "little")
        return hashlib.sha256(head + self.root).digest()


def root_of(files: Sequence[FileTree]) -> str:
    """Return the root of the tree over the files, in hexadecimal."""
    return merkle_root([file.digest for file in files]).hex()


def stored_root(folder: ModelFolder) -> str:
    """Return the root of a folder whose files have not changed since they were hashed; otherwise an empty string."""
    files = _files(folder)
    known = _read(folder)
    trees = [known.get(_facts(file)) for file in files]
    found = [tree for tree in trees if tree is not None]
    return root_of(found) if len(found) == len(files) else ""


def weights_identity(folder: ModelFolder, root: str = "") -> str:
    """Return a string that only folders with equal weights share.

    It is the fingerprint if that covers every byte, or else `root`, by default the stored one. Before the weights have
    been hashed, it names the files themselves.
    """
    if not folder.is_sampled:
        return folder.fingerprint
    if root:
        return root
    status = [file.stat() for file in _files(folder)]
    facts = [(item.st_dev, item.st_ino, item.st_size, item.st_mtime_ns, item.st_ctime_ns) for item in status]
    return stored_root(folder) or f"{folder.fingerprint} {facts}"


def hash_weights(folder: ModelFolder, pace: Callable[[int], None] = lambda _: None) -> str:
    """Hash the files that changed since they were last hashed, store the tree, and return the root in hexadecimal.

    `pace` is called with the number of bytes after each leaf. The tree is stored after each file, so that an
    interruption loses the work on one file. Raises ConfigError if a file changes meanwhile, or OSError if it cannot be
    read.
    """
    return _hash_all(folder, _read(folder), pace)


def verify_weights(folder: ModelFolder, pace: Callable[[int], None] = lambda _: None) -> str:
    """Hash all files again, although their sizes and times have not changed; otherwise like `hash_weights`. A root that
    differs from the stored one shows that a file was damaged.
    """
    return _hash_all(folder, {}, pace)


def _hash_all(folder: ModelFolder, known: dict[_Facts, FileTree], pace: Callable[[int], None]) -> str:
    files = _files(folder)
    for file in files:
        facts = _facts(file)
        if facts not in known:
            leaves = _hash(file, pace)
            if _facts(file) != facts:
                raise ConfigError(f"{file} changed while it was hashed", field="model")
            known[facts] = FileTree(*facts, leaves)
            _store(folder, known.values())
    trees = [known[_facts(file)] for file in files]
    _store(folder, trees)
    return root_of(trees)


def _hash(file: Path, pace: Callable[[int], None]) -> bytes:
    leaves, buffer = bytearray(), memoryview(bytearray(LEAF_BYTES))
    with file.open("rb", buffering=0) as stream:
        while True:
            count = 0
            while count < LEAF_BYTES and (read := stream.readinto(buffer[count:])):
                count += read
            if count or not leaves:
                digest = hashlib.sha256(_LEAF)
                digest.update(buffer[:count])
                leaves += digest.digest()
            if count < LEAF_BYTES:
                return bytes(leaves)
            pace(count)


def _facts(file: Path) -> _Facts:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _files(folder: ModelFolder) -> list[Path]:
    return [folder.path / "config.json", *folder.weight_files]


def _paths(folder: ModelFolder) -> list[Path]:
    """Return the places in which the tree may be stored, the preferred one first."""
    path = folder.path.resolve()
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    other = midstream_home() / "trees" / f"{name}.json"
    return [other] if repository_of(path) else [folder.path / _NAME, other]


def _read(folder: ModelFolder) -> dict[_Facts, FileTree]:
    """Return the stored trees of files by their facts; a damaged or foreign file counts as missing."""
    found: dict[_Facts, FileTree] = {}
    for path in _paths(folder):
        try:
            content = read_json(path, optional=True)
            if (content.get("version"), content.get("leaf_bytes")) != (_VERSION, LEAF_BYTES):
                continue
            for item in content["files"]:
                leaves = base64.b64decode(item["leaves"], validate=True)
                size, modified_ns, changed_ns = (int(item[name]) for name in ("size", "modified_ns", "changed_ns"))
                facts = (str(item["name"]), size, modified_ns, changed_ns)
                if len(leaves) == _HASH_BYTES * max(-(-size // LEAF_BYTES), 1):
                    found[facts] = FileTree(*facts, leaves)
        except (ConfigError, OSError, KeyError, TypeError, ValueError, binascii.Error):
            continue
    return found


def _store(folder: ModelFolder, trees: Iterable[FileTree]) -> None:
    """Store the trees; without a writable place they are hashed again at the next start."""
    files = [
        {
            "name": tree.name,
            "size": tree.size,
            "modified_ns": tree.modified_ns,
            "changed_ns": tree.changed_ns,
            "leaves": base64.b64encode(tree.leaves).decode(),
        }
        for tree in trees
    ]
    text = json.dumps({"version": _VERSION, "hash": "sha256", "leaf_bytes": LEAF_BYTES, "files": files}) + "\n"
    for path in _paths(folder):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            continue
        return
