"""The contents of a journal after its scheduler has died, and recovery from it."""

from __future__ import annotations

import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.clock import SteadyClock
from protos import generation_pb2, worker_pb2
from scheduler.core.effects import Accepted, Effect
from scheduler.core.events import AbortRequested, Event, StopWordFound, Submitted
from scheduler.core.request import ExtraOutput, FinishReason, Request
from scheduler.core.request_spec import RequestSpec
from scheduler.journal import DeposedError, is_entry
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.records import replay
from scheduler.journal.store import Store, StoredJournal, Transaction
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


class Tables(Store):
    """A database with tables of requests and commits, in memory."""

    def __init__(self) -> None:
        self._epoch = 0
        self.requests: dict[int, tuple[bytes, bytes]] = {}
        self.commits: list[bytes] = []

    def take_over(self, least_epoch: int) -> int:
        self._epoch = max(self._epoch + 1, least_epoch)
        return self._epoch

    def read(self) -> StoredJournal:
        return StoredJournal(
            requests=[(number, *row) for number, row in self.requests.items()],
            commits=list(enumerate(self.commits, 1)),
        )

    def write(self, transaction: Transaction) -> None:
        self.requests |= {number: (request, b"") for number, request in transaction.accepted}
        if transaction.compacted is not None:
            for number, output in transaction.compacted:
                self.requests[number] = self.requests[number][0], output
            self.commits.clear()
        elif transaction.commit:
            self.commits.append(transaction.commit)
        for number in transaction.forgotten:
            del self.requests[number]

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def store_at(path: Path) -> Store:
    return LogStore(LogFolder(path), segment_bytes=4096)


def begin(path: Path, **config: Any) -> JournaledCore:
    return continue_with(store_at(path), **config)


def continue_with(store: Store, **config: Any) -> JournaledCore:
    core = JournaledCore(store, **config)
    core.harness.add_group()
    return core


def test_a_scheduler_killed_at_any_token_goes_on_to_the_same_output(path: Path, tmp_path: Path) -> None:
    core = begin(path)
    core.submit("a", [5, 6, 7], 48)
    core.submit("b", [50, 60], 48, num_sequences=2)
    moments: list[Path] = []
    while True:
        moments.append(shutil.copytree(path, tmp_path / str(len(moments))))
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


def test_ended_requests_are_restored_unchanged(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 9)
    core.submit("b", [70], 100)
    for _ in range(4):
        core.step()
    core.handle(StopWordFound(core.harness.now_ns, "a", 0, 2, "so"))
    core.handle(AbortRequested(core.harness.now_ns, "b"))
    before = core.harness.core.lifecycle.requests
    core.store.close()
    after = begin(path).harness.core.lifecycle.requests
    assert list(after) == ["a", "b"]
    for request_id in after:
        assert after[request_id].sequences[0].end == before[request_id].sequences[0].end
        assert after[request_id].times == before[request_id].times
        assert after[request_id].num_output_tokens == before[request_id].num_output_tokens
    end = after["a"].sequences[0].end
    assert end is not None
    assert (end.reason, end.num_tokens, end.stop_word) == (FinishReason.STOP, 2, "so")


def test_resubmitting_after_a_restart_attaches(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 4)
    core.run()
    core.store.close()
    core = begin(path)
    core.submit("a", [5], 4)
    assert core.harness.accepted == {"a": 1}
    assert core.harness.core.lifecycle.num_unfinished == 0
    core.submit("a", [6], 4)
    assert core.harness.refused["a"].failure.field == "request_id"


def test_extra_outputs_come_back(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 9)
    core.step()
    sequence = core.harness.core.lifecycle.requests["a"].sequences[0]
    rows = worker_pb2.RowOutputs(log_probs=generation_pb2.LogProbs()).SerializeToString()
    sequence.outputs.append(ExtraOutput(len(sequence.output), rows))
    core.step()
    length = len(sequence.output)
    core.store.close()
    again = begin(path).harness.core.lifecycle.requests["a"].sequences[0]
    assert again.outputs == [ExtraOutput(length - 1, rows)]


def test_forgotten_requests_are_removed_from_the_file(path: Path) -> None:
    core = begin(path, max_num_finished=2)
    for number in range(6):
        core.submit(str(number), [number + 1], 3)
        core.run()
    core.store.close()
    assert sorted(begin(path, max_num_finished=2).harness.core.lifecycle.requests) == ["4", "5"]


def test_compaction_keeps_the_output_and_bounds_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.journal.writer.MIN_COMPACTION_BYTES", 2000)
    tables = Tables()
    core = continue_with(tables, max_num_finished=4)
    for number in range(60):
        core.submit(str(number), [number + 1], 40)
        core.run()
    assert core.writer.num_compactions > 5
    assert len(tables.requests) == 4
    assert sum(map(len, tables.commits)) < 10_000
    after = continue_with(tables, max_num_finished=4)
    assert after.output("59") == list(range(61, 101))


def test_epochs_grow_and_a_deposed_writer_is_refused(path: Path) -> None:
    old = begin(path)
    old.submit("a", [5], 9)
    old.step()
    new = begin(path)
    assert new.epoch > old.epoch
    with pytest.raises(DeposedError):
        old.step()
    with pytest.raises(DeposedError):
        old.store.check()
    new.run()
    assert new.output("a") == [6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_damaged_commit_ends_reading_and_the_rest_is_recomputed() -> None:
    tables = Tables()
    core = continue_with(tables)
    core.submit("a", [5], 20)
    for _ in range(10):
        core.step()
    core.submit("b", [50], 3)
    core.step()
    count, tables.commits[3] = len(tables.commits), bytes.fromhex("00112233")
    after = continue_with(tables)
    assert after.num_damaged == count - 3
    assert len(after.output("a")) == 3
    after.run()
    assert after.output("a") == list(range(6, 26))
    assert after.output("b") == [51, 52, 53]


def test_only_the_damaged_request_is_skipped() -> None:
    tables = Tables()
    core = continue_with(tables)
    core.submit("a", [5], 20)
    core.submit("b", [50], 20)
    core.step()
    tables.requests[1] = b"\0", b""
    after = continue_with(tables)
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


def test_requests_of_another_model_are_dropped(path: Path) -> None:
    core = begin(path)
    core.submit("a", [5], 3)
    core.store.close()
    store = store_at(path)
    store.take_over(least_epoch=1)
    replayed = replay(store.read(), LIMITS, "another", CLOCK)
    assert (replayed.num_foreign, replayed.requests) == (1, {})


@pytest.mark.parametrize("jump_s", [3, -3, 3600, -3600])
@pytest.mark.parametrize("boot", ["this", "another"])
def test_a_deadline_outlasts_a_restart_and_on_the_same_machine_also_a_jump(jump_s: int, boot: str) -> None:
    second = 1_000_000_000
    before = SteadyClock(lambda: 1_700_000_000 * second, lambda: 50 * second, boot_id="this")
    spec = RequestSpec(
        request_id="a", prompt=array("I", [1]), max_tokens=4, deadline_ns=before.now_ns() + 25 * second,
        payload=generation_pb2.GenerateRequest(request_id="a").SerializeToString(),
    )  # fmt: skip
    store = Tables()
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


def test_a_finished_request_is_kept_for_its_time_after_a_restart_whatever_the_clock_says() -> None:
    store = Tables()
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
