"""A real worker process, driven over ZeroMQ by a scripted scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from gpu_worker.model_runner import ModelRunner
from gpu_worker.worker import memory_usage
from midstream.model.folder import open_model_folder
from protos import worker_pb2
from tests.gpu_worker.endless import STARTED, Endless
from tests.gpu_worker.scripted_scheduler import PROMPT, ScriptedScheduler, greedy, run_prompt, worker_process
from tests.gpu_worker.tiny_models import Driver
from tests.integration.named_processes import ROOT


@pytest.fixture(scope="module")
def scheduler() -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def worker(scheduler: ScriptedScheduler, tiny_folder: Path) -> Iterator[subprocess.Popen[str]]:
    with worker_process(scheduler.address, tiny_folder) as process:
        scheduler.register(epoch=1)
        yield process


@pytest.fixture
def epoch(scheduler: ScriptedScheduler, worker: subprocess.Popen[str]) -> int:
    """Start a new epoch, so that the worker forgets the previous epoch and registers again."""
    assert worker.poll() is None
    scheduler.send(epoch_ended=worker_pb2.EpochEnded(epoch=scheduler.epoch))
    scheduler.register(scheduler.epoch + 1)
    return scheduler.epoch


@pytest.fixture(scope="module")
def expected(tiny_runner: ModelRunner) -> list[int]:
    """Return the expected continuation of PROMPT."""
    return Driver(tiny_runner).run_alone(PROMPT, 6)


def test_it_offers_its_features(scheduler: ScriptedScheduler, tiny_folder: Path) -> None:
    with worker_process(scheduler.address, tiny_folder, "--group-id", "g7") as process:
        offer = scheduler.receive("register", lambda register: register.group_id == "g7")
        assert offer.kind.model_fingerprint == open_model_folder(str(tiny_folder)).fingerprint
        assert (offer.tokens_per_block, offer.num_blocks, offer.vocab_size) == (16, 256, 331)
        assert (offer.max_sequence_length, offer.max_batch_size, offer.max_num_tokens) == (512, 8, 256)
        assert (offer.world_size, offer.device, offer.dtype) == (1, "cpu", "float32")
        assert "log_probs" in offer.features
        scheduler.send(rejected=worker_pb2.Rejected(field="tokens_per_block", reason="16 is not 32"))
        assert process.wait(240) == 3
        _, log = process.communicate()
        assert "rejected by the scheduler: tokens_per_block: 16 is not 32" in log


def test_steps_are_executed_with_two_in_flight(scheduler: ScriptedScheduler, epoch: int, expected: list[int]) -> None:
    assert run_prompt(scheduler, 6) == expected


def test_a_new_epoch_starts_from_nothing(scheduler: ScriptedScheduler, epoch: int, expected: list[int]) -> None:
    assert run_prompt(scheduler, 2) == expected[:2]
    scheduler.send(epoch_ended=worker_pb2.EpochEnded(epoch=epoch))
    scheduler.register(epoch + 1)
    assert run_prompt(scheduler, 6) == expected


def test_heartbeats_tell_of_progress(scheduler: ScriptedScheduler, epoch: int) -> None:
    run_prompt(scheduler, 3)
    heartbeat = scheduler.receive("heartbeat", lambda heartbeat: heartbeat.last_step_id == 3)
    assert heartbeat.epoch == epoch
    assert heartbeat.memory.cpu_bytes > 1 << 20


def test_junk_and_stale_messages_change_nothing(scheduler: ScriptedScheduler, epoch: int, expected: list[int]) -> None:
    scheduler.send_raw(b"\x80\x04\x95junk that is no protobuf\xff\xff")
    scheduler.send_raw(b"")
    scheduler.send_raw(b"two", b"frames")
    scheduler.send_step(1, epoch=epoch - 1, generation_rows=[0])
    scheduler.send(epoch_ended=worker_pb2.EpochEnded(epoch=epoch - 1))
    scheduler.send(registered=worker_pb2.Registered(epoch=epoch - 1))
    assert run_prompt(scheduler, 6) == expected


def test_a_repeated_step_is_dropped(scheduler: ScriptedScheduler, epoch: int, expected: list[int]) -> None:
    assert run_prompt(scheduler, 4) == expected[:4]
    scheduler.send_step(4, repeat_generation=True)
    assert list(scheduler.run_step(5, repeat_generation=True).token_ids) == expected[4:5]


def test_a_missing_step_ends_the_epoch(scheduler: ScriptedScheduler, epoch: int, expected: list[int]) -> None:
    run_prompt(scheduler, 2)
    scheduler.send_step(4, repeat_generation=True)
    scheduler.register(epoch + 1)
    assert run_prompt(scheduler, 6) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_rows": [3]},
        {"generation_rows": [1 << 20]},
        {"context_rows": [0], "context_starts": [0], "context_lengths": [1000]},
        {"block_rows": [0], "block_ids": [1 << 20]},
        {"block_rows": [0] * 60, "block_ids": [1] * 60},
        {"context_rows": [0], "context_starts": [0]},
    ],
    ids=["inactive row", "no such row", "unknown tokens", "no such block", "long table", "ragged arrays"],
)
def test_a_step_that_cannot_be_executed_ends_the_epoch(
    scheduler: ScriptedScheduler, epoch: int, expected: list[int], fields: dict[str, list[int]]
) -> None:
    run_prompt(scheduler, 2)
    scheduler.send_step(3, **fields)
    scheduler.send_step(4)
    scheduler.register(epoch + 1)
    assert run_prompt(scheduler, 6) == expected


def test_a_failed_step_counts_as_a_death_and_a_lost_one_does_not(scheduler: ScriptedScheduler, epoch: int) -> None:
    def registration_after(step_id: int) -> int:
        run_prompt(scheduler, 2)
        scheduler.send_step(step_id, generation_rows=[3])
        return scheduler.register(scheduler.epoch + 1).incarnation

    first = registration_after(step_id=9)
    assert registration_after(step_id=9) == first
    assert registration_after(step_id=3) != first


def test_a_request_the_worker_cannot_serve_fails_alone(
    scheduler: ScriptedScheduler, epoch: int, expected: list[int]
) -> None:
    processed = greedy(1, PROMPT)
    processed.logits_post_processor_name = "unheard_of"
    outside = greedy(2, [1, 331])
    result = scheduler.run_step(
        1,
        add_sequences=[processed, outside, greedy(3, PROMPT)],
        context_rows=[1, 2, 3],
        context_starts=[0, 0, 0],
        context_lengths=[7, 2, 7],
    )
    assert list(result.token_ids) == [0, 0, expected[0]]
    assert [(error.row, error.error.code, error.error.field) for error in result.errors] == [
        (1, 3, "logits_post_processor_name"),
        (2, 3, "token_ids"),
    ]
    result = scheduler.run_step(2, generation_rows=[3], released_rows=[1, 2])
    assert (list(result.token_ids), len(result.errors)) == (expected[1:2], 0)


def test_a_restarted_or_silent_scheduler_gets_a_registration(tiny_folder: Path, expected: list[int]) -> None:
    first = ScriptedScheduler()
    with worker_process(first.address, tiny_folder):
        first.register(epoch=1)
        assert run_prompt(first, 2) == expected[:2]
        first.close()
        second = ScriptedScheduler(first.port)
        second.register(epoch=2)
        assert run_prompt(second, 6) == expected
        second.send(registered=worker_pb2.Registered(epoch=3, heartbeat_interval_ms=50, timeout_ms=200))
        second.receive("heartbeat", lambda heartbeat: heartbeat.epoch == 3)
        second.register(epoch=4)
        assert run_prompt(second, 6) == expected
        second.close()


def test_sigterm_finishes_current_work_and_exits(tiny_folder: Path) -> None:
    scripted = ScriptedScheduler()
    with worker_process(scripted.address, tiny_folder) as process:
        scripted.register(epoch=1)
        run_prompt(scripted, 2)
        process.send_signal(signal.SIGTERM)
        leave = scripted.receive("leave")
        assert leave.epoch == 1
        assert process.wait(240) == 0
    scripted.close()


def test_it_hands_over_and_ends_while_a_step_runs(tiny_folder: Path) -> None:
    """The step is one call of native code, during which Python handles no signals, and does not end."""
    scripted = ScriptedScheduler()
    variables = {"MIDSTREAM_LOGITS_POST_PROCESSORS": f"endless={Endless.__module__}:Endless", "PYTHONPATH": str(ROOT)}
    with worker_process(scripted.address, tiny_folder, variables=variables) as process:
        scripted.register(epoch=1)
        run_prompt(scripted, 2)
        endless = greedy(1, PROMPT)
        endless.logits_post_processor_name = "endless"
        fields = {"context_rows": [1], "context_starts": [0], "context_lengths": [7]}
        scripted.send_step(3, add_sequences=[endless], **fields)
        assert process.stderr is not None
        next(line for line in process.stderr if STARTED in line)
        process.send_signal(signal.SIGTERM)
        assert scripted.receive("leave").epoch == 1
        assert process.wait(240) == 0
    scripted.close()


def test_after_it_has_left_nothing_more_is_computed(tiny_folder: Path) -> None:
    scripted = ScriptedScheduler()
    with worker_process(scripted.address, tiny_folder, "--hash-bytes-per-s", "0") as process:
        scripted.register(epoch=1)
        run_prompt(scripted, 2)
        scripted.receive("heartbeat")
        before = psutil.Process(process.pid).cpu_times()
        process.send_signal(signal.SIGTERM)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        # Destroying the interpreter with all of torch takes a second of CPU time, and several seconds on a busy host.
        assert used.ru_utime + used.ru_stime - before.user - before.system < 0.3
    scripted.close()


def test_it_serves_health_and_metrics(tiny_folder: Path) -> None:
    scripted = ScriptedScheduler()
    with worker_process(scripted.address, tiny_folder) as process:
        scripted.register(epoch=1)
        run_prompt(scripted, 3)
        scripted.send_raw(b"\xff")
        scripted.receive("heartbeat")
        scripted.receive("heartbeat")
        assert process.stderr is not None
        ready = next(json.loads(line) for line in process.stderr if '"ready"' in line)
        with urllib.request.urlopen(f"http://127.0.0.1:{ready['http_port']}/health") as answer:
            assert json.load(answer)["status"] == "SERVING"
        with urllib.request.urlopen(f"http://127.0.0.1:{ready['http_port']}/metrics") as answer:
            metrics = answer.read().decode()
        assert "midstream:worker_tokens_total 3.0" in metrics
        assert 'midstream:worker_messages_dropped_total{reason="malformed"} 1.0' in metrics
    scripted.close()


def wait_for_seals(folder: Path, num_blocks: int) -> None:
    """Wait until a thread of the worker has sealed the first blocks of its pool, the only one in `folder`."""
    (pool,) = folder.glob("*.kv")
    page_size = 4096  # the first page contains the hashes, the second one the seals
    give_up_at = time.monotonic() + 240
    while not np.fromfile(pool, dtype=np.uint64, count=num_blocks, offset=page_size).all():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_worker_adopts_the_blocks_of_a_dead_one(tiny_folder: Path, tmp_path: Path, tiny_runner: ModelRunner) -> None:
    prompt = [(7 * place) % 300 + 5 for place in range(40)]  # 2.5 blocks
    flags = ("--shared-kv-folder", str(tmp_path))
    scripted = ScriptedScheduler()
    with worker_process(scripted.address, tiny_folder, *flags) as process:
        store = scripted.register(epoch=1).kv_store
        scripted.run_step(
            1,
            add_sequences=[greedy(0, prompt)],
            context_rows=[0],
            context_starts=[0],
            context_lengths=[40],
            hashed_blocks=[0, 1],
            block_hashes=[70, 71],
        )
        wait_for_seals(tmp_path, 2)
        process.kill()
    with worker_process(scripted.address, tiny_folder, *flags):
        assert scripted.register(epoch=2).kv_store == store != ""
        found = scripted.run_step(1, adopted_blocks=[9, 8, 12], adopted_hashes=[71, 70, 72])
        assert list(found.missing_blocks) == [12]
        # Only the tokens after these two blocks are computed.
        result = scripted.run_step(
            2, add_sequences=[greedy(1, prompt)], context_rows=[1], context_starts=[32], context_lengths=[8]
        )
        tokens = [*result.token_ids, *scripted.run_step(3, generation_rows=[1]).token_ids]
        assert tokens == Driver(tiny_runner).run_alone(prompt, 2)
    scripted.close()


def test_a_worker_that_leaves_leaves_its_blocks(tiny_folder: Path, tmp_path: Path) -> None:
    """The heir can copy them as soon as the scheduler knows that the worker has left, even if it still runs."""
    flags, prompt = ("--shared-kv-folder", str(tmp_path)), [(7 * place) % 300 + 5 for place in range(40)]
    variables = {"MIDSTREAM_LOGITS_POST_PROCESSORS": f"endless={Endless.__module__}:Endless", "PYTHONPATH": str(ROOT)}
    step = {"context_rows": [0], "context_starts": [0], "context_lengths": [40]}
    first, second = ScriptedScheduler(), ScriptedScheduler()
    with worker_process(first.address, tiny_folder, *flags, variables=variables) as process:
        store = first.register(epoch=1).kv_store
        first.run_step(1, add_sequences=[greedy(0, prompt)], hashed_blocks=[0, 1], block_hashes=[70, 71], **step)
        wait_for_seals(tmp_path, 2)
        with worker_process(second.address, tiny_folder, *flags):
            assert second.register(epoch=2).kv_store == store != ""
            assert second.run_step(1, adopted_blocks=[9], adopted_hashes=[70]).missing_blocks == [9]
            process.send_signal(signal.SIGTERM)
            assert first.receive("leave").leaves_blocks
            found = second.run_step(2, adopted_blocks=[9, 8, 12], adopted_hashes=[71, 70, 72])
            assert list(found.missing_blocks) == [12]
            assert process.wait(240) == 0
    first.close()
    second.close()


def test_the_last_worker_that_leaves_removes_its_blocks(tiny_folder: Path, tmp_path: Path) -> None:
    scripted = ScriptedScheduler()
    with worker_process(scripted.address, tiny_folder, "--shared-kv-folder", str(tmp_path)) as process:
        scripted.register(epoch=1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
    assert not list(tmp_path.iterdir())
    scripted.close()


def test_a_wrong_setting_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    for flags, message in (
        (("--device", "tpu"), "device: 'tpu' is not a device"),
        (("--price-per-hour", "-1"), "price_per_hour: is -1.0; must be from 0 to 1e+09"),
        (("--model", str(tmp_path)), "lacks config.json"),
    ):
        with worker_process("tcp://127.0.0.1:1", tiny_folder, *flags) as process:
            _, log = process.communicate(timeout=240)
            assert process.returncode == 2
            assert message in log


def test_memory_is_reported_by_the_system_and_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = memory_usage(torch.device("cpu"))
    assert usage.cpu_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert (usage.gpu_bytes, usage.pinned_bytes) == (0, 0)
    # The worker's own device is queried, whichever device is current in the calling thread.
    monkeypatch.setattr(torch.cuda, "memory_reserved", {torch.device("cuda:1"): 4096}.__getitem__)
    counts = {"allocated_bytes": {"current": 1024, "peak": 2048}, "active_bytes": {"current": 512, "peak": 512}}
    monkeypatch.setattr(torch.cuda.memory, "host_memory_stats_as_nested_dict", lambda: counts)
    usage = memory_usage(torch.device("cuda:1"))
    assert (usage.gpu_bytes, usage.pinned_bytes) == (4096, 1024)
