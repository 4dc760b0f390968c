"""KV pools that outlive their processes: blocks are found by hash only after the death of the worker."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_worker.kv import shared_store as kv_store
from gpu_worker.kv.shared_store import KvStore, PoolMemory
from midstream.errors import ConfigError

NUM_LAYERS, BLOCK_BYTES = 3, 64
NUM_CORRUPTIONS = int(os.environ.get("TEST_CORRUPTIONS", "60"))

_DYING_WORKER = f"""
import sys
from pathlib import Path
from gpu_worker.kv.shared_store import KvStore

store = KvStore(Path(sys.argv[1]), sys.argv[2], {NUM_LAYERS})
pool = store.make_pool(8, {BLOCK_BYTES})
for block in (1, 5, 6):
    pool.keys[:, block] = 10 + block
    pool.values[:, block] = 20 + block
    pool.hashes[block] = 2**63 + block
    store.seal(block, 2**63 + block, pool.read(block, 2**63 + block))
pool.hashes[6] = 0
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(folder: Path, kind: str = "kind") -> Iterator[subprocess.Popen[str]]:
    """Run another process with a pool of 8 blocks; blocks 1 and 5 have hashes."""
    command = [sys.executable, "-c", _DYING_WORKER, str(folder), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def leave_pool(folder: Path, kind: str = "kind") -> None:
    """Kill a worker, which leaves its pool behind."""
    with worker(folder, kind):
        pass


def heir_of(folder: Path) -> tuple[KvStore, PoolMemory]:
    """Return a store in this process and its pool, which has another size than that of the worker."""
    store = KvStore(folder, "kind", NUM_LAYERS)
    memory = store.make_pool(4, BLOCK_BYTES)
    assert memory is not None
    return store, memory


def fetch(store: KvStore, memory: PoolMemory, *wanted: int) -> list[int]:
    """Fetch the blocks with these hashes into blocks 0, 1, ...; return the blocks whose hashes were not found."""
    hashes = np.array([2**63 + block for block in wanted], dtype=np.uint64)
    return [int(block) for block in store.fetch(hashes, np.arange(len(wanted), dtype=np.int32), memory)]


def test_hashed_blocks_of_a_dead_worker_are_copied_and_others_are_missing(tmp_path: Path) -> None:
    leave_pool(tmp_path / "pools")
    store, memory = heir_of(tmp_path / "pools")
    assert fetch(store, memory, 5, 6, 1, 9) == [1, 3]
    assert memory.keys[:, :, 0].tolist() == [[15, 0, 11, 0]] * NUM_LAYERS
    assert (memory.values[:, 0] == 25).all()
    assert (memory.values[:, 2] == 21).all()
    assert not memory.values[:, (1, 3)].any()
    store.close()


def test_blocks_of_several_dead_workers_are_combined(tmp_path: Path) -> None:
    leave_pool(tmp_path)
    store, memory = heir_of(tmp_path)
    with worker(tmp_path):
        pass
    assert fetch(store, memory, 1, 5) == []
    store.close()


def test_pools_of_living_workers_are_not_read(tmp_path: Path) -> None:
    store, memory = heir_of(tmp_path)
    with worker(tmp_path) as process:
        assert fetch(store, memory, 5) == [0]
        process.kill()
        process.wait()
        assert fetch(store, memory, 5) == []
    store.close()


def test_blocks_of_another_kind_are_not_taken(tmp_path: Path) -> None:
    leave_pool(tmp_path, "another")
    store, memory = heir_of(tmp_path)
    assert fetch(store, memory, 5) == [0]
    assert store.name != KvStore(tmp_path, "another", NUM_LAYERS).name
    assert store.name == KvStore(tmp_path, "kind", NUM_LAYERS).name
    store.close()


def test_a_worker_that_exits_normally_leaves_no_files(tmp_path: Path) -> None:
    store, _ = heir_of(tmp_path)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_the_last_worker_to_exit_removes_pools_of_dead_ones(tmp_path: Path) -> None:
    store, _ = heir_of(tmp_path)
    last, _ = heir_of(tmp_path)
    leave_pool(tmp_path, "another")
    store.close()
    assert len(list(tmp_path.iterdir())) == 2
    last.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_files_of_others_are_neither_opened_nor_removed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "letter.kv").write_text("dear")
    store, memory = heir_of(tmp_path)
    assert fetch(store, memory, 5) == [0]
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.kv", "pipe"]


def test_pools_of_dead_workers_are_removed_if_a_new_pool_needs_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pool(tmp_path)
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(
        "gpu_worker.kv.shared_store.shutil.disk_usage", lambda _: SimpleNamespace(free=0 if left.exists() else 1 << 20)
    )
    store, _ = heir_of(tmp_path)
    assert not left.exists()
    store.close()


def test_unused_pools_are_removed_after_a_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_pool(tmp_path)
    (left,) = tmp_path.iterdir()
    with worker(tmp_path) as other:
        (alive,) = set(tmp_path.iterdir()) - {left}
        monkeypatch.setattr(kv_store, "_KEEP_S", 0.05)
        store, _ = heir_of(tmp_path)
        while left.exists():
            assert other.poll() is None
        assert alive.exists()
        store.close()


def test_a_damaged_file_is_skipped(tmp_path: Path) -> None:
    leave_pool(tmp_path)
    (left,) = tmp_path.iterdir()
    os.truncate(left, 100)
    store, memory = heir_of(tmp_path)
    assert fetch(store, memory, 5) == [0]
    store.close()


@pytest.mark.timeout(3600)
def test_corrupt_blocks_of_a_dead_worker_are_counted_and_not_used(tmp_path: Path) -> None:
    """Set TEST_CORRUPTIONS=10000 for a manual run."""
    leave_pool(tmp_path)
    (left,) = tmp_path.iterdir()
    store, memory = heir_of(tmp_path)
    whole, rng = left.read_bytes(), random.Random(5)
    page, layer = 4096, 8 * BLOCK_BYTES  # the hashes and the seals take one page each; each layer has 8 blocks
    for number in range(NUM_CORRUPTIONS):
        # Flip a bit of block 5 or of its checksum, or copy block 1 over it.
        places = [2 * page + part * layer + 5 * BLOCK_BYTES for part in range(2 * NUM_LAYERS)]
        spoiled = bytearray(whole)
        match number % 3:
            case 0:
                spoiled[rng.choice(places) + rng.randrange(BLOCK_BYTES)] ^= 1 << rng.randrange(8)
            case 1:
                spoiled[page + 5 * 8 + rng.randrange(4)] ^= 1 << rng.randrange(8)
            case _:
                for place in rng.sample(places, rng.randint(1, len(places))):
                    source = place - 4 * BLOCK_BYTES
                    spoiled[place : place + BLOCK_BYTES] = whole[source : source + BLOCK_BYTES]
        left.write_bytes(spoiled)
        assert fetch(store, memory, 5, 1) == [0]
        assert store.num_damaged == number + 1
        assert not memory.keys[:, 0].any()
    left.write_bytes(whole)
    assert fetch(store, memory, 5, 1) == []
    store.close()


def test_a_block_whose_worker_died_before_it_was_sealed_is_missing(tmp_path: Path) -> None:
    leave_pool(tmp_path)
    (left,) = tmp_path.iterdir()
    data = bytearray(left.read_bytes())
    data[4096 + 5 * 8 : 4096 + 6 * 8] = bytes(8)
    left.write_bytes(data)
    store, memory = heir_of(tmp_path)
    assert fetch(store, memory, 5, 1) == [0]
    assert store.num_damaged == 0
    store.close()


def test_a_pool_without_room_is_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KvStore(tmp_path, "kind", NUM_LAYERS)
    assert store.make_pool(1 << 40, BLOCK_BYTES) is None
    assert "not shared" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_unused_space_of_living_pools_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.kv.shared_store.shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    leave_pool(tmp_path)
    assert kv_store.free_bytes(tmp_path) == 1 << 30
    store, memory = heir_of(tmp_path)
    assert 0 <= 2 * memory.keys.size + 2 * 4096 - ((1 << 30) - kv_store.free_bytes(tmp_path)) <= 4096
    store.close()


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 700") as caught:
        KvStore(tmp_path, "kind", NUM_LAYERS)
    assert caught.value.field == "shared_kv_folder"
