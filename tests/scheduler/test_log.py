"""The journal as a log: power cuts at any operation, damage to any byte, the log's size, and competing writers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.clock import SteadyClock
from midstream.config import SchedulerConfig
from midstream.errors import ConfigError
from protos import generation_pb2
from protos import journal_pb2 as pb
from scheduler.journal import DeposedError, JournalError, LoadedAdapter, LostError
from scheduler.journal.adapters import encode_adapter
from scheduler.journal.frames import Frame, frame, frames
from scheduler.journal.log import VERSION, LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.store import Transaction, seal
from scheduler.journal.threaded import ThreadedJournal
from scheduler.service import make_journal
from tests.scheduler.harness import LIMITS
from tests.scheduler.power_cut import PATH, InterruptedDisk, PowerCut
from tests.scheduler.test_journal import begin

CLOCK = SteadyClock()
PRINT = "print"
SEGMENT_BYTES, SLACK_BYTES = 400, 1000


@dataclass
class State:
    """Expected contents of a journal: output tokens by request, and the bytes of loaded adapters by name."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    adapters: dict[str, int] = field(default_factory=dict)


def request_row(number: int) -> bytes:
    payload = generation_pb2.GenerateRequest(
        request_id=str(number), token_ids=generation_pb2.TokenIds(values=[1]), max_tokens=100
    )
    record = pb.JournalRequest(payload=payload.SerializeToString(), model_fingerprint=PRINT, accepted_unix_ns=1)
    return seal(record.SerializeToString())


def commit(tokens: list[tuple[int, int]]) -> bytes:
    record = pb.JournalCommit(requests=[number for number, _ in tokens], token_ids=[token for _, token in tokens])
    return seal(record.SerializeToString())


def output_row(number: int, tokens: list[int]) -> bytes:
    record = pb.JournalCommit(requests=[number], num_tokens=[len(tokens)], token_ids=tokens)
    return seal(record.SerializeToString())


@pytest.fixture
def disk() -> Iterator[InterruptedDisk]:
    disk = InterruptedDisk()
    with disk.mounted():
        yield disk


class Scheduler:
    """Writes transactions, and tracks the contents that the log must have."""

    def __init__(self, folder: LogFolder, segment_bytes: int = SEGMENT_BYTES, slack_bytes: int = SLACK_BYTES) -> None:
        self.store = LogStore(folder, segment_bytes=segment_bytes, slack_bytes=slack_bytes)
        self._journal = ThreadedJournal(self.store, LIMITS, PRINT, CLOCK)
        contents, _ = self._journal._open()
        self.epoch, self.num_damaged = contents.scheduler_epoch, self._journal.num_damaged
        self.found = State(
            {int(item.spec.request_id): list(item.outputs[0]) for item in contents.requests},
            {item.name: item.num_bytes for item in contents.adapters},
        )

    def transaction(self, state: State, action: int, which: int, token: int) -> tuple[Transaction, State]:
        """Return a transaction that may be committed, and the state after it."""
        after, result = copy.deepcopy(state), Transaction()
        numbers = sorted(after.outputs)
        if action == 0 or not numbers:
            result.accepted = [(token, request_row(token))]
            after.outputs[token] = []
        elif action == 1:
            number = numbers[which % len(numbers)]
            result.forgotten = [number]
            del after.outputs[number]
        elif action == 2:
            adapter = LoadedAdapter(name=f"a{which % 2}", path="", fingerprint="", num_bytes=token)
            result.adapters = [(adapter.name, seal(encode_adapter(adapter, PRINT)))]
            after.adapters[adapter.name] = token
        elif action == 3 and after.adapters:
            name = sorted(after.adapters)[which % len(after.adapters)]
            result.adapters = [(name, b"")]
            del after.adapters[name]
        else:
            chosen = [number for position, number in enumerate(numbers) if which >> position & 1] or numbers
            result.commit = commit([(number, token) for number in chosen])
            for number in chosen:
                after.outputs[number].append(token)
        live_bytes = sum(70 + 4 * len(tokens) for tokens in after.outputs.values())
        for number in self.store.stale(live_bytes):
            if number in after.outputs:
                result.rewritten.append((number, request_row(number), output_row(number, after.outputs[number])))
        return result, after


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    lives=st.lists(
        st.tuples(
            st.integers(0, 80),
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), max_size=25),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_nothing_committed_is_lost_and_nothing_else_appears_whenever_the_power_is_cut(
    lives: list[tuple[int, list[tuple[int, int]], bool]], seed: int
) -> None:
    """Each scheduler ends after a given number of file operations, either killed or by a power cut."""
    disk, dice = InterruptedDisk(), random.Random(seed)
    committed = pending = State()
    token, epoch = itertools.count(1), 0
    with disk.mounted():
        for num_operations, actions, is_cut in lives:
            disk.operations_left = num_operations
            try:
                scheduler = Scheduler(disk.folder())
                assert scheduler.found in (committed, pending)
                assert scheduler.epoch > epoch
                # The recovered contents count as committed, since the scheduler delivers them.
                committed, epoch = scheduler.found, scheduler.epoch
                for action, which in actions:
                    if action == 9:
                        scheduler.store.check()
                        continue
                    transaction, pending = scheduler.transaction(committed, action, which, next(token))
                    scheduler.store.write(transaction)
                    committed = pending
            except PowerCut:
                pass
            disk.died(None)
            if is_cut:
                disk.cut_power(dice)
        disk.operations_left = -1
        found = Scheduler(disk.folder()).found
        assert found in (committed, pending)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    num_operations=st.integers(0, 60),
    actions=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 15)), min_size=1, max_size=15),
)
def test_a_successor_finds_all_that_was_reported_whenever_it_takes_over(
    num_operations: int, actions: list[tuple[int, int]]
) -> None:
    """A successor takes over in the middle of its predecessor's operation, unless the predecessor holds the lock."""
    disk = InterruptedDisk()
    with disk.mounted():
        first, successors = Scheduler(disk.folder()), list[Scheduler]()
        left = itertools.count(num_operations, -1)

        def take_over() -> None:
            if next(left) <= 0 and not disk.is_locked:
                disk.meanwhile = lambda: None
                successors.append(Scheduler(disk.folder()))

        committed = pending = first.found
        disk.meanwhile = take_over
        with contextlib.suppress(DeposedError, LostError):
            for token, (action, which) in enumerate(actions, 1):
                transaction, pending = first.transaction(committed, action, which, token)
                first.store.write(transaction)
                committed = pending
        disk.meanwhile = lambda: None
        successor = successors[0] if successors else Scheduler(disk.folder())
        assert successor.found in (committed, pending)
        with pytest.raises((DeposedError, LostError)):
            first.store.check()
        transaction, state = successor.transaction(successor.found, 0, 0, 1000)
        successor.store.write(transaction)
        later = Scheduler(disk.folder())
        assert (later.found, later.num_damaged) == (state, 0)


def filled(folder: LogFolder, num_commits: int, segment_bytes: int = SEGMENT_BYTES) -> State:
    """Write a log of four requests whose output grows; return its contents."""
    scheduler = Scheduler(folder, segment_bytes)
    state = scheduler.found
    for token in range(1, num_commits + 1):
        action = 0 if token <= 4 else 4
        transaction, state = scheduler.transaction(state, action, token % 16, token)
        scheduler.store.write(transaction)
    scheduler.store.close()
    return state


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    which=st.integers(0, 100),
    share=st.floats(0, 1, exclude_max=True),
    flip=st.integers(0, 255).map(lambda bits: bits or None),
)
def test_damage_at_any_byte_is_noticed_and_makes_up_nothing(which: int, share: float, flip: int | None) -> None:
    """One byte of a segment is changed, or the segment is truncated at that byte."""
    disk = InterruptedDisk()
    with disk.mounted():
        true = filled(disk.folder(), 30)
        files = [file for name, file in disk.files(PATH).items() if name.endswith(".log")]
        content = files[which % len(files)].content
        place = int(share * len(content))
        if flip is None:
            del content[place:]
        else:
            content[place] ^= flip
        after = Scheduler(disk.folder())
        for number, tokens in after.found.outputs.items():
            assert tokens == true.outputs[number][: len(tokens)]
        assert after.num_damaged > 0
        # The recovered contents are undamaged, and the next scheduler recovers the same.
        again = Scheduler(disk.folder())
        assert (again.found, again.num_damaged) == (after.found, 0)


def test_damage_names_file_and_offset_and_keeps_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    true = filled(LogFolder(path), 30, segment_bytes=1 << 16)
    file = path / "00000001.log"
    content = bytearray(file.read_bytes())
    found = [item for item in frames(bytes(content), len(content)) if isinstance(item, Frame)]
    place = found[17].start  # after the header and 16 tokens
    content[place + 30] ^= 1
    file.write_bytes(content)
    scheduler = Scheduler(LogFolder(path), segment_bytes=1 << 16)
    assert f"{file} is damaged at byte {place}" in caplog.text
    assert file.with_name("00000001.log.damaged").read_bytes() == content
    # It is unknown which requests the damaged commit contained, so all requests continue from before it.
    expected = {number: [token for token in tokens if token < 17] for number, tokens in true.outputs.items()}
    assert scheduler.found.outputs == expected
    scheduler.store.close()


def test_a_torn_tail_is_not_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    true = filled(LogFolder(path), 10, segment_bytes=1 << 16)
    file = path / "00000001.log"
    content = bytearray(file.read_bytes())
    end = len(content.rstrip(b"\0"))
    torn = frame(99, b"torn")[:-1]
    content[end : end + len(torn)] = torn
    file.write_bytes(content)
    scheduler = Scheduler(LogFolder(path), segment_bytes=1 << 16)
    assert scheduler.found == true
    assert "the journal's last transaction was cut off" in caplog.text
    assert "is damaged at" not in caplog.text
    scheduler.store.close()


def test_its_size_is_proportional_to_live_data(disk: InterruptedDisk) -> None:
    """Write one long-lived request and many short ones."""
    segment_bytes, slack_bytes = 4000, 8000
    scheduler = Scheduler(disk.folder(), segment_bytes=segment_bytes, slack_bytes=slack_bytes)
    state = scheduler.found
    largest = num_written = 0
    for token in range(1, 2000):
        action = 0 if token % 10 == 1 else 1 if token % 10 == 9 and len(state.outputs) > 3 else 4
        transaction, state = scheduler.transaction(state, action, 1, token)
        scheduler.store.write(transaction)
        live_bytes = sum(70 + 4 * len(tokens) for tokens in state.outputs.values())
        size = sum(len(file.content) for file in disk.files(PATH).values())
        largest = max(largest, size - 2 * live_bytes)
        num_written += len(transaction.rewritten)
    assert largest <= slack_bytes + 2 * segment_bytes
    assert 0 < num_written < 250
    assert Scheduler(disk.folder()).found == state


def test_a_newer_log_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    file = path / "00000001.log"
    file.write_bytes(frame(1, pb.JournalSegment(version=VERSION + 1).SerializeToString()))
    with pytest.raises(ConfigError, match="newer version"):
        LogStore(LogFolder(path)).take_over(1)
    assert [item.name for item in path.glob("*.log")] == [file.name]


def test_an_emptied_log_is_reported_on_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    filled(LogFolder(path), 5)
    for file in path.glob("*.log"):
        file.unlink()
    with caplog.at_level(logging.ERROR):
        scheduler = Scheduler(LogFolder(path))
    assert scheduler.num_damaged == 1
    assert "was emptied" in caplog.text
    scheduler.store.close()


def test_it_is_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new"
    filled(LogFolder(path), 2)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    path.chmod(0o755)  # the state in which an earlier version left it
    for file in path.iterdir():
        file.chmod(0o644)
    Scheduler(LogFolder(path)).store.close()
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in path.glob("*.log")} == {0o600}


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(10)


def replace(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").replace(file)


def swap(file: Path) -> None:
    """Replace a file with a copy; the original gets another name."""
    file.rename(file.with_name("moved"))
    shutil.copy(file.with_name("moved"), file)


@pytest.mark.parametrize("victim", ["lock", "00000001.log"])
def test_a_write_to_a_deleted_file_is_not_taken_for_one_that_lasts(tmp_path: Path, victim: str) -> None:
    folder = LogFolder(tmp_path)
    folder.open()
    size = folder.create("00000001.log", 4096)
    folder.check("00000001.log", size)
    (tmp_path / victim).unlink()
    with pytest.raises(LostError, match=victim):
        folder.check("00000001.log", size)
    folder.close()


@pytest.mark.parametrize(
    "harm",
    [
        shutil.rmtree,
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: (path / "lock").unlink(),
        lambda path: (path / "00000001.log").unlink(),
        lambda path: truncate(path / "00000001.log"),
        lambda path: replace(path / "00000001.log"),
        lambda path: swap(path / "00000001.log"),
    ],
    ids=[
        "folder deleted",
        "folder renamed",
        "lock deleted",
        "file deleted",
        "file truncated",
        "file replaced",
        "file swapped",
    ],
)
def test_the_deletion_of_a_log_in_use_is_detected_and_it_is_recreated(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    path = tmp_path / "journal"
    core = begin(path)
    core.submit("a", [1, 2], 20)
    core.step()
    harm(path)
    with pytest.raises(LostError, match=str(path)):
        core.store.check()
    with contextlib.suppress(LostError):
        core.submit("b", [1, 2], 2)
    # The state in memory is written to a new log, under the same epoch.
    core.store.begin_anew()
    core.store.write(core.writer.everything())
    core.run()
    core.store.close()
    later = begin(path)
    assert later.epoch > core.epoch
    assert (later.output("a"), later.output("b")) == (list(range(3, 23)), [3, 4])
    assert later.num_damaged == 0
    later.store.close()


def test_a_log_that_another_process_recreated_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    store = LogStore(LogFolder(path))
    store.take_over(least_epoch=5)
    shutil.rmtree(path)
    successor = LogStore(LogFolder(path))
    assert successor.take_over(least_epoch=9) == 9
    with pytest.raises(LostError):
        store.check()
    with pytest.raises(DeposedError):
        store.begin_anew()
    successor.check()
    successor.close()


def test_a_full_disk_fails_the_transaction_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    scheduler = Scheduler(LogFolder(path), segment_bytes=1 << 16)
    transaction, state = scheduler.transaction(scheduler.found, 0, 0, 1)
    scheduler.store.write(transaction)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    end = len((path / "00000001.log").read_bytes().rstrip(b"\0"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (end + 10, limits[1]))
    try:
        with pytest.raises(JournalError, match="File too large"):
            scheduler.store.write(Transaction(accepted=[(2, request_row(2))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    scheduler.store.close()
    after = Scheduler(LogFolder(path))
    assert after.found == state
    after.store.close()


def test_a_lock_that_is_not_released_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.journal.log_folder._LOCK_TIMEOUT_S", 0.05)
    first, second = LogFolder(tmp_path / "journal"), LogFolder(tmp_path / "journal")
    first.open()
    with first, pytest.raises(JournalError, match="locked by another process"):
        LogStore(second).take_over(1)
    second.close()
    LogStore(second).take_over(1)
    second.close()
    first.close()


def settings_for(path: Path) -> SchedulerConfig:
    return SchedulerConfig(journal_path=str(path))


async def test_journals_whose_names_differ_after_a_dot_share_no_file(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        raise error

    model, clock = cast("Any", SimpleNamespace(fingerprint="print")), SteadyClock()
    journals = [
        make_journal(settings_for(tmp_path / name), model, LIMITS, 0, clock)
        for name in ("10.0.0.1", "10.0.0.2", "scheduler-1.journal")
    ]
    for journal in journals:
        await journal.open(fail)
    found = await asyncio.to_thread(lambda: {path.name for path in tmp_path.glob("*.documents")})
    assert found == {"10.0.0.1.documents", "10.0.0.2.documents", "scheduler-1.documents"}
    for journal in journals:
        await journal.close()


def test_a_file_that_is_not_a_journal_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a file"):
        make_journal(settings_for(path), cast("Any", None), LIMITS, 0, CLOCK)
    assert path.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("is_marked", [False, True])
def test_what_could_not_be_synced_survives_a_power_cut_once_the_successor_has_read_it(
    disk: InterruptedDisk, is_marked: bool
) -> None:
    """After a failed sync, Linux takes the data for written, so that a second sync does nothing."""
    state = State()
    scheduler = Scheduler(disk.folder())
    transaction, state = scheduler.transaction(state, 0, 0, 1)
    scheduler.store.write(transaction)
    if is_marked:
        scheduler.store.check()
    transaction, state = scheduler.transaction(state, 4, 1, 7)
    disk.failures_left["sync"] = 1
    with pytest.raises(JournalError, match="cannot be written"):
        scheduler.store.write(transaction)

    assert Scheduler(disk.folder()).found == state
    for seed in range(20):
        copied = copy.deepcopy(disk)
        copied.cut_power(random.Random(seed))
        with copied.mounted():
            successor = Scheduler(copied.folder())
        assert (successor.found, successor.num_damaged) == (state, 0)


def test_a_log_in_new_folders_survives_a_power_cut(disk: InterruptedDisk) -> None:
    scheduler = Scheduler(disk.folder("/home/new/journal"))
    transaction, state = scheduler.transaction(State(), 0, 0, 1)
    scheduler.store.write(transaction)
    disk.cut_power(random.Random(0))
    assert Scheduler(disk.folder("/home/new/journal")).found == state


def test_a_log_deleted_just_before_a_segment_is_begun_counts_as_lost(disk: InterruptedDisk) -> None:
    scheduler = Scheduler(disk.folder(), segment_bytes=200)
    folder = scheduler.store._folder
    create = folder.create

    def create_and_delete(name: str, num_bytes: int) -> int:
        size = create(name, num_bytes)
        disk.delete(PATH)
        return size

    folder.create = create_and_delete  # type: ignore[method-assign]
    with pytest.raises(LostError):
        scheduler.store.write(Transaction(accepted=[(1, bytes(300))]))


def test_a_deposed_scheduler_ends_as_such_even_if_its_files_were_deleted(disk: InterruptedDisk) -> None:
    deposed = Scheduler(disk.folder())
    transaction, state = deposed.transaction(State(), 0, 0, 1)
    deposed.store.write(transaction)
    successor = Scheduler(disk.folder())
    successor.store.write(successor.transaction(state, 1, 0, 2)[0])  # the first segment has no rows left
    assert "00000001.log" not in disk.files(PATH)
    with pytest.raises(DeposedError):
        deposed.store.check()
    deposed.store.close()
