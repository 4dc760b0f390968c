"""What makes two workers be of the same kind."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpu_worker import kind
from gpu_worker.kind import worker_kind
from gpu_worker.weight_hasher import WeightHasher
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder
from midstream.model.weight_tree import hash_weights, stored_root
from tests.gpu_worker.scripted_scheduler import ScriptedScheduler, worker_process
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model
from tests.midstream.test_weight_tree import damage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "Llama")
    return path


def arithmetic_of(folder: Path, tensor_size: int = 1, tokenizer: str = "", **settings: Any) -> str:
    runner = make_runner(folder, **settings)
    config = WorkerConfig(model=str(folder), **settings)
    model = replace(open_model_folder(str(folder)), tokenizer_fingerprint=tokenizer)
    result = worker_kind(config, model, runner.model, tensor_size)
    runner.close()
    assert result.model_fingerprint == model.fingerprint
    return result.arithmetic


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "int8"},
        {"kv": "f32"},
        {"weights": "int8"},
        {"activations": "int8"},
        {"max_attention_window": 64},
        {"max_attention_window": 64, "sink_token_length": 4},
        {"kernels": "torch"},
        {"implementation": "transformers"},
        {"tensor_size": 2},
        {"tokenizer": "of other grammars"},
    ],
    ids=str,
)
def test_settings_that_change_the_tokens_change_the_kind(folder: Path, settings: dict[str, Any]) -> None:
    assert arithmetic_of(folder, **settings) != arithmetic_of(folder)


def test_each_window_and_number_of_ranks_is_a_kind_of_its_own(folder: Path) -> None:
    kinds = {
        arithmetic_of(folder, max_attention_window=32),
        arithmetic_of(folder, max_attention_window=64),
        arithmetic_of(folder, tensor_size=2),
        arithmetic_of(folder, tensor_size=4),
    }
    assert len(kinds) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "int16"},  # what `auto` means on the CPU kernels
        {"activations": "int16"},
        {"tokens_per_block": 32},
        {"num_threads": 2},
        {"max_batch_size": 3},
        {"max_kv_tokens": 1024},
    ],
    ids=str,
)
def test_settings_that_do_not_change_the_tokens_leave_the_kind(folder: Path, settings: dict[str, Any]) -> None:
    assert arithmetic_of(folder, **settings) == arithmetic_of(folder)


def test_instruction_sets_are_kinds_since_sampled_tokens_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = arithmetic_of(folder)
    monkeypatch.setattr(kind, "load_library", lambda isa: SimpleNamespace(isa="another"))
    assert arithmetic_of(folder) != own


def test_a_worker_announces_the_root_once_its_weights_are_hashed(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    make_tiny_model(path, "Llama")
    scheduler = ScriptedScheduler()
    try:
        with worker_process(scheduler.address, path):
            assert scheduler.register(epoch=1).kind.weights_root == ""
            hashed = scheduler.receive("weights_hashed")
        root = hash_weights(open_model_folder(str(path)))
        assert (hashed.epoch, hashed.weights_root) == (1, root)
        with worker_process(scheduler.address, path):
            assert scheduler.register(epoch=2).kind.weights_root == root
    finally:
        scheduler.close()


def test_a_worker_whose_weights_were_damaged_ends(tmp_path: Path) -> None:
    """Its successor has the right identity."""
    path = tmp_path / "model"
    path.mkdir()
    make_tiny_model(path, "Llama")
    model = open_model_folder(str(path))
    hash_weights(model)
    damage(model, model.weight_files[0].stat().st_size - 4)
    (path / "midstream.json").unlink()  # it has the fingerprint, which covers every byte of a small model
    wrong = stored_root(model)
    scheduler = ScriptedScheduler()
    try:
        with worker_process(scheduler.address, path) as process:
            assert scheduler.register(epoch=1).kind.weights_root == wrong
            assert process.stderr is not None
            assert "a weight file was damaged" in process.stderr.read()
            assert process.wait(240) == 1
        with worker_process(scheduler.address, path):
            assert scheduler.register(epoch=2).kind.weights_root == hash_weights(model) != wrong
    finally:
        scheduler.close()


def test_weights_are_hashed_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.mkdir()
    make_tiny_model(path, "Llama")
    model = open_model_folder(str(path))
    (path / "midstream.tree.json").mkdir()
    (tmp_path / "home").write_text("not a folder")
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    hasher = WeightHasher(model, 100 << 20, found.put)
    hasher.start()
    try:
        assert found.get(timeout=240) == hash_weights(model)
    finally:
        hasher.close()


def test_hashing_has_the_lowest_priority_and_ends_with_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    make_tiny_model(path, "Llama")
    with (path / "model.safetensors").open("ab") as file:
        file.truncate(64 << 20)
    found: list[str] = []
    hasher = WeightHasher(open_model_folder(str(path)), 1 << 20, found.append)  # takes a minute
    hasher.start()
    assert hasher._process is not None
    process = psutil.Process(hasher._process.pid)
    try:
        deadline = time.monotonic() + 240
        while process.nice() != 19 or process.ionice().ioclass != psutil.IOPRIO_CLASS_IDLE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert hasher._process.stdin is not None
        hasher._process.stdin.close()  # as when the worker dies
        assert hasher._process.wait(240) != 0
        assert not found
    finally:
        hasher.close()
