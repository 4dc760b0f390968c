"""A real worker process that sleeps and wakes up, driven by a scripted scheduler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from midstream.model.folder import open_model_folder
from midstream.model.weight_tree import hash_weights
from protos import worker_pb2
from tests.gpu_worker.scripted_scheduler import PROMPT, ScriptedScheduler, run_prompt, worker_process
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

KV_BYTES = 200 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with enough weights to be seen in the memory of its process."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "Llama", intermediate_size=65536)
    hash_weights(open_model_folder(str(folder)))
    return folder


@pytest.fixture
def scheduler() -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    yield scripted
    scripted.close()


@pytest.fixture
def worker(scheduler: ScriptedScheduler, folder: Path) -> Iterator[subprocess.Popen[str]]:
    with worker_process(scheduler.address, folder, "--group-id", "g") as process:
        yield process


def set_sleep(scheduler: ScriptedScheduler, level: int) -> worker_pb2.Register:
    """Let the worker sleep at a level or wake up; return its next registration."""
    scheduler.send(set_sleep=worker_pb2.SetSleep(epoch=scheduler.epoch, level=level))
    assert scheduler.receive("leave").epoch == scheduler.epoch
    return scheduler.register(scheduler.epoch + 1)


def memory_of(process: subprocess.Popen[str]) -> int:
    return int(psutil.Process(process.pid).memory_info().rss)


@pytest.mark.parametrize("level", [1, 2])
def test_it_gives_its_memory_back_and_computes_the_same_tokens_afterwards(
    scheduler: ScriptedScheduler, worker: subprocess.Popen[str], folder: Path, level: int
) -> None:
    before = scheduler.register(epoch=1)
    assert "sleep" in before.features
    expected = run_prompt(scheduler, 6)
    awake = memory_of(worker)
    asleep = set_sleep(scheduler, level)
    assert asleep.sleep_level == level
    assert asleep.group_id == before.group_id
    assert asleep.incarnation == before.incarnation
    assert asleep.kind == before.kind
    num_bytes = sum(file.stat().st_size for file in open_model_folder(str(folder)).weight_files)
    freed = awake - memory_of(worker)
    assert freed > 0.5 * num_bytes, (awake, num_bytes)
    after = set_sleep(scheduler, 0)
    assert after.sleep_level == 0
    assert after.kind == before.kind
    assert not after.kept_blocks
    assert run_prompt(scheduler, 6) == expected == Driver(make_runner(folder)).run_alone(PROMPT, 6)
    # It gives back as much again and again.
    asleep_bytes = awake - freed
    for _ in range(3):
        set_sleep(scheduler, level)
        assert memory_of(worker) < 1.05 * asleep_bytes
        set_sleep(scheduler, 0)
        assert run_prompt(scheduler, 6) == expected


def test_an_order_that_is_repeated_changes_nothing(scheduler: ScriptedScheduler, worker: subprocess.Popen[str]) -> None:
    scheduler.register(epoch=1)
    expected = run_prompt(scheduler, 6)
    scheduler.send(set_sleep=worker_pb2.SetSleep(epoch=1, level=0))
    scheduler.send(epoch_ended=worker_pb2.EpochEnded(epoch=1))
    scheduler.register(epoch=2)
    assert run_prompt(scheduler, 6) == expected
    assert set_sleep(scheduler, 1).sleep_level == 1
    assert set_sleep(scheduler, 2).sleep_level == 2
    assert set_sleep(scheduler, 0).sleep_level == 0
    assert run_prompt(scheduler, 6) == expected


def test_a_sleeping_worker_follows_a_new_scheduler_and_leaves_when_told(
    scheduler: ScriptedScheduler, worker: subprocess.Popen[str]
) -> None:
    scheduler.register(epoch=1)
    set_sleep(scheduler, 1)
    scheduler.send(epoch_ended=worker_pb2.EpochEnded(epoch=scheduler.epoch))
    again = scheduler.register(epoch=7)
    assert again.sleep_level == 1
    scheduler.receive("heartbeat", lambda heartbeat: heartbeat.epoch == 7)
    worker.send_signal(signal.SIGTERM)
    leave = scheduler.receive("leave")
    assert (leave.epoch, leave.leaves_blocks) == (7, False)
    assert worker.wait(240) == 0


def test_it_does_not_wake_up_with_other_weights(scheduler: ScriptedScheduler, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    with worker_process(scheduler.address, tmp_path / "model") as process:
        scheduler.register(epoch=1)
        set_sleep(scheduler, 1)
        file = tmp_path / "model" / "model.safetensors"
        os.utime(file, ns=(1, 1))
        scheduler.send(set_sleep=worker_pb2.SetSleep(epoch=scheduler.epoch, level=0))
        _, log = process.communicate(timeout=240)
        assert process.returncode not in (0, None)
        assert "have changed since the weights were loaded" in log
