"""The contents of a journal after its scheduler has died, and recovery from it."""

from __future__ import annotations

import shutil
import sqlite3
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.clock import SteadyClock
from midstream.errors import ConfigError
from protos import generation_pb2, worker_pb2
from scheduler.core.effects import Accepted, Effect
from scheduler.core.events import AbortRequested, Event, StopWordFound, Submitted
from scheduler.core.request import ExtraOutput, FinishReason, Request
from scheduler.core.request_spec import RequestSpec
from scheduler.journal import DeposedError, JournalError, LostError, is_entry
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.records import replay
from scheduler.journal.sqlite import SqliteStore, torn_tail_bytes
from scheduler.journal.store import SCHEMA_VERSION, Store
from scheduler.journal.threaded import ThreadedJournal
from scheduler.journal.writer import RowWriter
from scheduler.wire.requests import spec_from_proto
from tests.scheduler.harness import LIMITS, Harness

PRINT = "print"
CLOCK = SteadyClock()


class JournaledCore:
    """A core whose effects are written to the journal immediately, without a thread."""

    def __init__(self, store: Store, **config: Any) -> None:
        self.store = store
        journal = ThreadedJournal(store, LIMITS, PRINT, CLOCK)
        contents, self.writer = journal._open()
        self.adapters = contents.adapters
        self.epoch, self.num_damaged = contents.scheduler_epoch, journal.num_damaged
        self.harness = Harness(**config)
        for request in contents.requests:
            self.handle(replace(request, time_ns=self.harness.now_ns))
        self.writer.know(self.harness.core.lifecycle.requests.values())

    def handle(self, event: Event) -> None:
        self.keep(self.harness.handle(event))

    def keep(self, effects: list[Effect]) -> None:
        entries = [effect for effect in effects if is_entry(effect)]
        if entries:
            transaction = self.writer.transaction(entries)
            transaction.rewritten = self.writer.rows(self.store.stale(self.writer.live_bytes))
            self.store.write(transaction)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, num_sequences: int = 1) -> None:
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=generation_pb2.TokenIds(values=prompt),
            max_tokens=max_tokens,
            sampling=generation_pb2.SamplingConfig(num_return_sequences=num_sequences, seed=1),
        )
        self.handle(Submitted(self.harness.now_ns, spec_from_proto(request, LIMITS, self.harness.now_ns)))

    def step(self) -> bool:
        """Run one step of the worker; return False if there is no step to run."""
        before = len(self.harness.effects)
        self.harness.turn()
        group = self.harness.groups["g"]
        if group.plans:
            self.harness.finish_step()
        self.keep(self.harness.effects[before:])
        return bool(group.plans) or len(self.harness.effects) > before

    def run(self) -> None:
        while self.step():
            pass

    def output(self, request_id: str, index: int = 0) -> list[int]:
        sequence = self.harness.core.lifecycle.requests[request_id].sequences[index]
        return list(sequence.output)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture(params=["journal.sqlite", "journal"])
def any_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the path of a SQLite journal or of a log, one per parameter."""
    return tmp_path / str(request.param)


def store_at(path: Path) -> Store:
    return SqliteStore(path) if path.suffix == ".sqlite" else LogStore(LogFolder(path), segment_bytes=4096)


def copy(path: Path, folder: Path) -> Path:
    """Copy the files in the state that a SIGKILL would leave."""
    folder.mkdir()
    if path.is_dir():
        shutil.copytree(path, folder / path.name)
    else:
        for file in path.parent.glob(path.name + "*"):
            shutil.copy(file, folder / file.name)
    return folder / path.name


def begin(path: Path, **config: Any) -> JournaledCore:
    core = JournaledCore(store_at(path), **config)
    core.harness.add_group()
    return core


def test_a_scheduler_killed_at_any_token_goes_on_to_the_same_output(any_path: Path, tmp_path: Path) -> None:
    core = begin(any_path)
    core.submit("a", [5, 6, 7], 48)
    core.submit("b", [50, 60], 48, num_sequences=2)
    moments: list[Path] = []
    while True:
        moments.append(copy(any_path, tmp_path / str(len(moments))))
        if not core.step():
            break
    expected = {key: core.output(*key) for key in (("a", 0), ("b", 0), ("b", 1))}
    assert [len(tokens) for tokens in expected.values()] == [48, 48, 48]
    lengths = []
    for moment in moments:
        next_one = begin(moment)
        lengths.append(sum(len(next_one.output(*key)) for key in expected))
        next_one.run()
        assert {key: next_one.output(*key) for key in expected} == expected
        assert next_one.harness.core.lifecycle.num_unfinished == 0
        next_one.store.close()
    assert lengths[0] == 0
    assert lengths[-1] == 3 * 48
    assert len(set(lengths)) >= 48


def test_ended_requests_are_restored_unchanged(any_path: Path) -> None:
    core = begin(any_path)
    core.submit("a", [5], 9)
    core.submit("b", [70], 100)
    for _ in range(4):
        core.step()
    core.handle(StopWordFound(core.harness.now_ns, "a", 0, 2, "so"))
    core.handle(AbortRequested(core.harness.now_ns, "b"))
    before = core.harness.core.lifecycle.requests
    core.store.close()
    after = begin(any_path).harness.core.lifecycle.requests
    assert list(after) == ["a", "b"]
    for request_id in after:
        assert after[request_id].sequences[0].end == before[request_id].sequences[0].end
        assert after[request_id].times == before[request_id].times
        assert after[request_id].num_output_tokens == before[request_id].num_output_tokens
    end = after["a"].sequences[0].end
    assert end is not None
    assert (end.reason, end.num_tokens, end.stop_word) == (FinishReason.STOP, 2, "so")


def test_resubmitting_after_a_restart_attaches(any_path: Path) -> None:
    core = begin(any_path)
    core.submit("a", [5], 4)
    core.run()
    core.store.close()
    core = begin(any_path)
    core.submit("a", [5], 4)
    assert core.harness.accepted == {"a": 1}
    assert core.harness.core.lifecycle.num_unfinished == 0
    core.submit("a", [6], 4)
    assert core.harness.refused["a"].failure.field == "request_id"


def test_extra_outputs_come_back(any_path: Path) -> None:
    core = begin(any_path)
    core.submit("a", [5], 9)
    core.step()
    sequence = core.harness.core.lifecycle.requests["a"].sequences[0]
    rows = worker_pb2.RowOutputs(log_probs=generation_pb2.LogProbs()).SerializeToString()
    sequence.outputs.append(ExtraOutput(len(sequence.output), rows))
    core.step()
    length = len(sequence.output)
    core.store.close()
    again = begin(any_path).harness.core.lifecycle.requests["a"].sequences[0]
    assert again.outputs == [ExtraOutput(length - 1, rows)]


def test_forgotten_requests_are_removed_from_the_file(any_path: Path) -> None:
    core = begin(any_path, max_num_finished=2)
    for number in range(6):
        core.submit(str(number), [number + 1], 3)
        core.run()
    core.store.close()
    assert sorted(begin(any_path, max_num_finished=2).harness.core.lifecycle.requests) == ["4", "5"]


def test_compaction_keeps_the_output_and_bounds_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.journal.writer.MIN_COMPACTION_BYTES", 2000)
    core = begin(path, max_num_finished=4)
    for number in range(60):
        core.submit(str(number), [number + 1], 40)
        core.run()
    assert core.writer.num_compactions > 5
    stored = core.store.read()
    assert len(stored.requests) == 4
    assert sum(len(record) for _, record in stored.commits) < 10_000
    core.store.close()
    after = begin(path, max_num_finished=4)
    assert after.output("59") == list(range(61, 101))


def test_epochs_grow_and_a_deposed_writer_is_refused(any_path: Path) -> None:
    old = begin(any_path)
    old.submit("a", [5], 9)
    old.step()
    new = begin(any_path)
    assert new.epoch > old.epoch
    with pytest.raises(DeposedError):
        old.step()
    with pytest.raises(DeposedError):
        old.store.check()
    new.run()
    assert new.output("a") == [6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_damaged_commit_ends_reading_and_the_rest_is_recomputed(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 20)
    for _ in range(10):
        core.step()
    core.submit("b", [50], 3)
    core.step()
    core.store.close()
    with sqlite3.connect(path) as connection:
        count = connection.execute("SELECT count(*) FROM commits").fetchone()[0]
        connection.execute("UPDATE commits SET record = x'00112233' WHERE number = 4")
    connection.close()
    after = begin(path)
    assert after.num_damaged == count - 3
    assert len(after.output("a")) == 3
    after.run()
    assert after.output("a") == list(range(6, 26))
    assert after.output("b") == [51, 52, 53]


def test_only_the_damaged_request_is_skipped(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 20)
    core.submit("b", [50], 20)
    core.step()
    core.store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE requests SET request = x'00' WHERE number = 1")
    connection.close()
    after = begin(path)
    assert after.num_damaged == 1
    assert list(after.harness.core.lifecycle.requests) == ["b"]


def test_only_the_request_of_a_newer_version_is_skipped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = begin(path)
    core.submit("a", [5], 20)
    core.submit("b", [50], 20)
    core.step()
    core.store.close()

    def read(payload: generation_pb2.GenerateRequest, *arguments: Any) -> Any:
        if payload.request_id == "a":
            raise ValueError("a name that this version cannot parse")
        return spec_from_proto(payload, *arguments)

    monkeypatch.setattr("scheduler.journal.records.spec_from_proto", read)
    after = begin(path)
    assert after.num_damaged == 1
    assert list(after.harness.core.lifecycle.requests) == ["b"]


def test_a_torn_tail_loses_only_its_transaction(path: Path, tmp_path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 20)
    for _ in range(6):
        core.step()
    killed = copy(path, tmp_path / "killed")
    log = killed.with_name(killed.name + "-wal")
    log.write_bytes(log.read_bytes()[:-100])
    assert torn_tail_bytes(killed) > 0
    after = begin(killed)
    assert after.num_damaged == 1
    assert len(after.output("a")) == len(core.output("a")) - 1
    after.run()
    assert after.output("a") == list(range(6, 26))


def test_a_file_that_is_not_a_journal_is_set_aside(path: Path) -> None:
    path.write_bytes(b"nonsense" * 1000)
    core = begin(path)
    assert core.num_damaged == 1
    assert path.with_name(path.name + ".damaged").read_bytes().startswith(b"nonsense")
    core.submit("a", [5], 3)
    core.run()
    assert core.output("a") == [6, 7, 8]


def test_a_newer_journal_is_refused_and_left_alone(path: Path) -> None:
    begin(path).store.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(ConfigError, match="newer version"):
        SqliteStore(path).take_over(1)


def test_requests_of_another_model_are_dropped(any_path: Path) -> None:
    core = begin(any_path)
    core.submit("a", [5], 3)
    core.store.close()
    store = store_at(any_path)
    store.take_over(least_epoch=1)
    replayed = replay(store.read(), LIMITS, "another", CLOCK)
    assert (replayed.num_foreign, replayed.requests) == (1, {})


def test_a_full_disk_fails_the_transaction_as_a_whole(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 9)
    core.step()
    assert isinstance(core.store, SqliteStore)
    (num_pages,) = core.store._connected.execute("PRAGMA page_count").fetchone()
    assert core.store._connected.execute(f"PRAGMA max_page_count = {num_pages}").fetchone() == (num_pages,)
    with pytest.raises(JournalError, match="full"):
        core.submit("b", list(range(1, 900)) * 4, 3)
    core.store.close()
    after = begin(path)
    assert list(after.harness.core.lifecycle.requests) == ["a"]


@pytest.mark.parametrize("jump_s", [3, -3, 3600, -3600])
@pytest.mark.parametrize("boot", ["this", "another"])
def test_a_deadline_outlasts_a_restart_and_on_the_same_machine_also_a_jump(
    tmp_path: Path, jump_s: int, boot: str
) -> None:
    second = 1_000_000_000
    before = SteadyClock(lambda: 1_700_000_000 * second, lambda: 50 * second, boot_id="this")
    spec = RequestSpec(
        request_id="a", prompt=array("I", [1]), max_tokens=4, deadline_ns=before.now_ns() + 25 * second,
        payload=generation_pb2.GenerateRequest(request_id="a").SerializeToString(),
    )  # fmt: skip
    store = SqliteStore(tmp_path / "journal")
    store.take_over(least_epoch=1)
    writer = RowWriter({}, PRINT, before)
    store.write(writer.transaction([Accepted(Request(spec, 1), is_attached=False)]))
    # By the monotonic clock, two seconds have passed.
    after = SteadyClock(lambda: (1_700_000_002 + jump_s) * second, lambda: 52 * second, boot_id=boot)
    (stored,) = replay(store.read(), LIMITS, PRINT, after).requests.values()
    assert stored.recovered.spec.deadline_ns is not None
    left_s = (stored.recovered.spec.deadline_ns - after.now_ns()) / second
    assert left_s == (23 if boot == "this" else 23 - jump_s)
    store.close()


def test_a_finished_request_is_kept_for_its_time_after_a_restart_whatever_the_clock_says(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "journal")
    core = JournaledCore(store)
    core.harness.add_group()
    core.submit("a", [1, 2], 2)
    while core.step():
        pass
    ended_ns = core.harness.core.lifecycle.requests["a"].times.finished_ns
    (stored,) = replay(store.read(), LIMITS, PRINT, CLOCK).requests.values()
    later = Harness()
    later.now_ns = ended_ns + 3_600_000_000_000  # an hour by the wall clock
    later.handle(stored.event(later.now_ns))
    later.ended["a"] = FinishReason.LENGTH
    later.advance(59_000)
    assert "a" in later.core.lifecycle.requests
    later.advance(2_000)
    assert "a" not in later.core.lifecycle.requests
    store.close()


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_the_files_are_private_to_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    store = SqliteStore(folder / "journal")
    core = JournaledCore(store)
    core.submit("a", [1, 2], 2)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert modes(folder) == {0o600}
    for path in folder.iterdir():  # the state in which an earlier version left the journal
        path.chmod(0o644)
    second = SqliteStore(folder / "journal")
    second.take_over(least_epoch=1)
    assert modes(folder) == {0o600}
    for each in (store, second):
        each.close()


@pytest.mark.parametrize("how", ["delete", "delete the log", "truncate", "truncate the log", "replace"])
def test_the_deletion_of_a_journal_in_use_is_detected(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal"
    store = SqliteStore(path)
    core = JournaledCore(store)
    core.harness.add_group()
    core.submit("a", [1, 2], 20)
    core.step()
    victim = path.with_name("journal-wal") if "log" in how else path
    if how.startswith("delete"):
        victim.unlink()
    elif how == "replace":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    else:
        with victim.open("r+b") as file:
            file.truncate(0)
    with pytest.raises(LostError, match=str(victim)):
        store.check()
    with pytest.raises(LostError):
        core.submit("b", [1, 2], 2)
    # The state in memory is written to a new journal, under the same epoch.
    store.begin_anew()
    store.write(core.writer.everything())
    while core.step():
        pass
    store.close()
    later = SqliteStore(path)
    epoch = later.take_over(least_epoch=1)
    assert epoch == core.epoch + 1
    known = list(replay(later.read(), LIMITS, PRINT, CLOCK).requests.values())
    assert [item.recovered.spec.request_id for item in known] == ["a", "b"]
    assert [item.outputs[0].tolist() for item in known] == [list(range(3, 23)), [3, 4]]
    later.close()


def test_a_journal_that_another_process_recreated_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    store = SqliteStore(path)
    store.take_over(least_epoch=5)
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    successor = SqliteStore(path)
    assert successor.take_over(least_epoch=9) == 9
    with pytest.raises(LostError):
        store.check()
    with pytest.raises(DeposedError):
        store.begin_anew()
    successor.check()
    successor.close()


def test_a_truncated_journal_is_reported_on_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    store = SqliteStore(path)
    JournaledCore(store).submit("a", [1, 2], 2)
    store.close()
    with path.open("r+b") as file:
        file.truncate(0)
    again = SqliteStore(path)
    again.take_over(least_epoch=1)
    assert again.read().num_damaged == 1
    assert "was truncated" in caplog.text
    again.close()
