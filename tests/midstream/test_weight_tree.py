"""The Merkle tree over a model's weights, and how it is stored."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from midstream.model import folder as folders
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.weight_tree import LEAF_BYTES, hash_weights, stored_root, verify_weights, weights_identity

CONFIG = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
NAME = "midstream.tree.json"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make(path: Path, weights: bytes) -> ModelFolder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 64}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return open_model_folder(str(path))


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def file_digest(name: str, size: int, root: bytes) -> bytes:
    return sha(b"\2", len(name).to_bytes(8, "little"), name.encode(), size.to_bytes(8, "little"), root)


def count(folder: ModelFolder) -> int:
    """Return how many bytes a call hashes in whole leaves."""
    seen: list[int] = []
    hash_weights(folder, seen.append)
    return sum(seen)


def test_the_root_is_that_of_the_documented_tree(tmp_path: Path) -> None:
    pieces = (b"a" * LEAF_BYTES, b"b" * LEAF_BYTES, b"c")
    folder = make(tmp_path / "m", b"".join(pieces))
    first, second, third = (sha(b"\0", piece) for piece in pieces)
    weights = sha(b"\1", sha(b"\1", first, second), third)
    config = (tmp_path / "m" / "config.json").read_bytes()
    root = sha(
        b"\1",
        file_digest("config.json", len(config), sha(b"\0", config)),
        file_digest("model.safetensors", 2 * LEAF_BYTES + 1, weights),
    )
    assert hash_weights(folder) == root.hex() == stored_root(folder)


def test_a_change_between_the_samples_changes_the_root_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_MAX_DIGESTED_BYTES", 1 << 20)
    size = 32 << 20
    one, two = make(tmp_path / "one", bytes(size)), make(tmp_path / "two", bytes(size))
    assert one.is_sampled
    assert weights_identity(one) != weights_identity(two), "before they are hashed, they may differ"
    assert hash_weights(one) == hash_weights(two) == weights_identity(one) == weights_identity(two)
    with (tmp_path / "two" / "model.safetensors").open("r+b") as file:
        file.seek(100_000)  # the first sample ends before, the second one begins after 260,000
        file.write(b"x")
    (tmp_path / "two" / "midstream.json").unlink()
    changed = open_model_folder(str(tmp_path / "two"))
    assert changed.fingerprint == one.fingerprint
    assert stored_root(changed) == ""
    assert hash_weights(changed) != hash_weights(one)


def test_the_fingerprint_of_small_files_identifies_them(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", b"weights")
    assert not folder.is_sampled
    hash_weights(folder)
    assert weights_identity(folder) == folder.fingerprint


def test_only_changed_files_are_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    make(path, b"")
    (path / "model.safetensors").unlink()
    names = ["a.safetensors", "b.safetensors"]
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("xy", names, strict=True))}))
    for name in names:
        (path / name).write_bytes(bytes(2 * LEAF_BYTES))
    (path / "midstream.json").unlink()
    folder = open_model_folder(str(path))
    assert count(folder) == 4 * LEAF_BYTES
    root = stored_root(folder)
    assert count(folder) == 0
    (path / "b.safetensors").write_bytes(b"x" * 2 * LEAF_BYTES)
    assert stored_root(folder) == ""
    assert count(folder) == 2 * LEAF_BYTES
    assert stored_root(folder) not in ("", root)


def damage(folder: ModelFolder, byte: int) -> None:
    """Flip one bit of the first weight file, without a trace in the file's size and times as they are stored."""
    file = folder.weight_files[0]
    with file.open("r+b") as stream:
        stream.seek(byte)
        value = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([value ^ 1 << byte % 8]))
    tree = json.loads((folder.path / NAME).read_text())
    (item,) = (item for item in tree["files"] if item["name"] == file.name)
    status = file.stat()
    item["modified_ns"], item["changed_ns"] = status.st_mtime_ns, status.st_ctime_ns
    (folder.path / NAME).write_text(json.dumps(tree))


def test_a_flipped_bit_that_left_no_trace_is_found_by_reading_everything(tmp_path: Path) -> None:
    """100 of 100."""
    folder = make(tmp_path / "m", bytes(2 * LEAF_BYTES))
    roots = {hash_weights(folder)}
    for number in range(100):
        damage(folder, number * 20_011)
        assert stored_root(folder) in roots
        root = verify_weights(folder)
        assert root not in roots
        assert root == stored_root(folder) == hash_weights(folder)
        roots.add(root)


def test_a_copy_is_hashed_again_since_copying_may_have_damaged_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", bytes(LEAF_BYTES))
    root = hash_weights(folder)
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    copy = open_model_folder(str(tmp_path / "copy"))
    assert copy.weight_files[0].stat().st_mtime_ns == folder.weight_files[0].stat().st_mtime_ns
    assert stored_root(copy) == ""
    assert hash_weights(copy) == root


def test_the_tree_of_a_folder_that_cannot_be_written_is_stored_in_the_home_folder(tmp_path: Path, home: Path) -> None:
    folder = make(tmp_path / "m", bytes(LEAF_BYTES))
    (tmp_path / "m" / NAME).mkdir()
    root = hash_weights(folder)
    assert len(list((home / "trees").glob("*.json"))) == 1
    assert stored_root(folder) == root


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"version": 1, "leaf_bytes": 1048576, "files": [{"name": "config.json"}]}']
)
def test_a_damaged_tree_counts_as_missing(tmp_path: Path, content: str) -> None:
    folder = make(tmp_path / "m", bytes(LEAF_BYTES))
    root = hash_weights(folder)
    (tmp_path / "m" / NAME).write_text(content)
    assert stored_root(folder) == ""
    assert hash_weights(folder) == root
