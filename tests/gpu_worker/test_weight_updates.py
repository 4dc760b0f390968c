"""A real worker process that changes its weights, driven by a scripted scheduler."""

from __future__ import annotations

import gc
import json
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from gpu_worker.weight_updates import WeightUpdates
from midstream.config import WorkerConfig
from midstream.errors import StatusCode
from midstream.model.folder import open_model_folder
from midstream.model.weight_tree import hash_weights
from protos import worker_pb2
from tests.gpu_worker.scripted_scheduler import PROMPT, ScriptedScheduler, run_prompt, worker_process
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models `old`, `new` (with other weights) and `wide` (with another shape)."""
    root = tmp_path_factory.mktemp("updates")
    for name, settings in (("old", {}), ("wide", {"intermediate_size": 192})):
        (root / name).mkdir()
        make_tiny_model(root / name, "Llama", **settings)
    shutil.copytree(root / "old", root / "new")
    weights = load_file(root / "old" / "model.safetensors")
    save_file(
        {name: value * 1.1 for name, value in weights.items()}, root / "new" / "model.safetensors", {"format": "pt"}
    )
    return root


@pytest.fixture
def scheduler(root: Path, tmp_path: Path) -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    kv = tmp_path / "kv"
    flags = ("--update-root", str(root), "--shared-kv-folder", str(kv), "--host-kv-bytes", str(64 << 20))
    with worker_process(scripted.address, root / "old", "--group-id", "g", *flags):
        yield scripted
    scripted.close()


def prepare(scheduler: ScriptedScheduler, update: int, path: str) -> worker_pb2.WeightsPrepared:
    scheduler.send(prepare_weights=worker_pb2.PrepareWeights(epoch=scheduler.epoch, update=update, path=path))
    found: worker_pb2.WeightsPrepared = scheduler.receive("weights_prepared")
    assert (found.epoch, found.update) == (scheduler.epoch, update)
    return found


def switch(scheduler: ScriptedScheduler, update: int, path: str, root: str) -> None:
    wanted = worker_pb2.SwitchWeights(
        epoch=scheduler.epoch, update=update, path=path, weights_root=root, weights_version="v2"
    )
    scheduler.send(switch_weights=wanted)


def tokens_of(folder: Path) -> list[int]:
    return Driver(make_runner(folder)).run_alone(PROMPT, 6)


def test_it_serves_with_the_old_weights_until_it_is_told_to_switch(scheduler: ScriptedScheduler, root: Path) -> None:
    old, new = tokens_of(root / "old"), tokens_of(root / "new")
    assert old != new
    before = scheduler.register(epoch=1)
    found = prepare(scheduler, 5, str(root / "new"))
    assert found.weights_root == hash_weights(open_model_folder(str(root / "new")))
    assert found.model_fingerprint != before.kind.model_fingerprint
    assert run_prompt(scheduler, 6) == old
    switch(scheduler, 5, str(root / "new"), found.weights_root)
    assert scheduler.receive("leave").epoch == 1
    after = scheduler.register(epoch=2)
    assert (after.kind.weights_root, after.kind.weights_version) == (found.weights_root, "v2")
    assert after.kind.arithmetic == before.kind.arithmetic
    assert (after.group_id, after.incarnation) == (before.group_id, before.incarnation)
    # No block that the old weights have computed can be found under the new ones.
    assert not after.kept_blocks
    assert not after.stored_hashes
    for name in ("kv_store", "tier_store"):
        assert getattr(before, name)
        assert getattr(after, name) != getattr(before, name)
    assert run_prompt(scheduler, 6) == new


def test_a_worker_that_has_not_prepared_the_weights_loads_them_first(scheduler: ScriptedScheduler, root: Path) -> None:
    before = scheduler.register(epoch=1)
    wanted = hash_weights(open_model_folder(str(root / "new")))
    # It is told once more if it registers again while it loads, and changes its weights once.
    for _ in range(2):
        switch(scheduler, 6, str(root / "new"), wanted)
    assert scheduler.receive("leave").epoch == 1
    assert scheduler.register(epoch=2).kind.weights_root == wanted
    assert run_prompt(scheduler, 6) == tokens_of(root / "new")
    scheduler.receive("heartbeat", lambda heartbeat: heartbeat.epoch == 2)
    assert before.kind.weights_root != wanted


def test_weights_that_it_cannot_use_are_refused_and_change_nothing(
    scheduler: ScriptedScheduler, root: Path, tmp_path: Path
) -> None:
    scheduler.register(epoch=1)
    damaged = root / "damaged"
    shutil.copytree(root / "new", damaged, ignore=shutil.ignore_patterns("midstream*.json"))
    (damaged / "model.safetensors").write_bytes((root / "new" / "model.safetensors").read_bytes()[:-1000])
    settings = json.loads((root / "new" / "config.json").read_text())
    other = root / "other"
    shutil.copytree(root / "new", other, ignore=shutil.ignore_patterns("midstream*.json"))
    (other / "config.json").write_text(json.dumps(settings | {"rope_theta": 5.0}))
    link = root / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    for path, message in (
        (str(root / "wide"), "intermediate_size in config.json differs"),
        (str(other), "rope_theta in config.json differs"),
        (str(damaged), "model.safetensors"),
        (str(root / "none"), "is not a folder"),
        (str(link), "outside the folder for updates"),
        ("relative", "absolute path"),
    ):
        error = prepare(scheduler, 7, path).error
        assert message in error.message, (path, error)
        assert error.code == StatusCode.INVALID_ARGUMENT, (path, error)
    # Nor does it switch to files that are not those that the others have.
    switch(scheduler, 8, str(root / "new"), "another root")
    error = scheduler.receive("weights_prepared").error
    assert "must have another root" in error.message
    assert run_prompt(scheduler, 6) == tokens_of(root / "old")


class _Copy:
    """Weights that are prepared, without any."""

    root = "root"
    folder = SimpleNamespace(fingerprint="print")


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_prepared_copy_does_not_outlive_the_epoch_of_its_update(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, is_wanted: bool
) -> None:
    """A scheduler that dies after its workers have prepared weights will never drop them; only a change that was
    decided goes on.
    """
    may_load, copies, switched = threading.Event(), list[weakref.ref[_Copy]](), queue.Queue[str]()

    def load(*_: object) -> _Copy:
        may_load.wait(240)
        copy = _Copy()
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(WeightUpdates, "_load", load)
    answers: queue.Queue[worker_pb2.WeightsPrepared] = queue.Queue()
    updates = WeightUpdates(
        WorkerConfig(),
        open_model_folder(str(tiny_folder)),
        "plain",
        answer=answers.put,
        switch=lambda ready: switched.put(ready.version),
    )
    if is_wanted:
        wanted = worker_pb2.SwitchWeights(epoch=1, update=5, path="/new", weights_root="root", weights_version="v2")
        updates.take(worker_pb2.SchedulerMessage(switch_weights=wanted), 1)
        updates.begin_epoch()
        may_load.set()
        assert switched.get(timeout=240) == "v2"
        return
    may_load.set()
    asked = worker_pb2.PrepareWeights(epoch=1, update=5, path="/new")
    updates.take(worker_pb2.SchedulerMessage(prepare_weights=asked), 1)
    assert answers.get(timeout=240).weights_root == "root"
    updates.begin_epoch()
    give_up_at = time.monotonic() + 240
    while copies[0]() is not None:  # the thread may still be about to forget it
        assert time.monotonic() < give_up_at
        gc.collect()
