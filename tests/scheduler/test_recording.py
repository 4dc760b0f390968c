from __future__ import annotations

import dataclasses
import random
import re
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import ConfigError
from protos import recording_pb2 as pb
from scheduler.core.config import CoreConfig
from scheduler.core.effects import Effect
from scheduler.core.events import (
    AbortRequested,
    Attached,
    Detached,
    DrainStarted,
    Event,
    GenerationPaused,
    GenerationResumed,
    Recovered,
    SleepSet,
    StepDone,
    StopWordFound,
    Submitted,
    Turn,
    WeightsChanged,
    WeightsHashed,
    WorkerBeat,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.failure import Failure
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.pause_mode import PauseMode
from scheduler.core.request import Finish, FinishReason, RequestTimes, SequenceEnd
from scheduler.core.request_spec import RequestSpec, RetentionRange
from scheduler.replay.changes import Changes, Kill
from scheduler.replay.recording import Recorder, frame, read_recording
from scheduler.replay.recording_codec import Outcome, decode_config, decode_event, encode_config, encode_record
from scheduler.replay.replay import Replay, replay, simulate
from scheduler.replay.replay import main as run_replay
from scheduler.replay.simulator import main as run_simulate
from scheduler.replay.step_times import StepTimes
from tests.scheduler.harness import MS, Harness

SPEC = RequestSpec(
    request_id="a",
    prompt=array("I", [5, 6]),
    max_tokens=7,
    num_sequences=2,
    stop_token_ids=frozenset({9, 8}),
    min_tokens=1,
    client_id="c",
    priority=-3,
    cache_salt="salt",
    lora_name="lora",
    is_detached=True,
    is_cacheable=False,
    arrival_ns=4,
    deadline_ns=0,
    retention=(RetentionRange(0, None, 90), RetentionRange(1, 2, 10, 0)),
    decode_priority=40,
    decode_duration_ns=0,
    digest=b"d",
)
KIND = Kind("print", "root", "int8", "weights in int8")
EVENTS: list[Event] = [
    Submitted(1, SPEC),
    Recovered(
        2,
        SPEC,
        (array("I", [1]), array("I")),
        ((1, SequenceEnd(FinishReason.STOP, 0, "word")),),
        finish=Finish(RequestTimes(finished_ns=5)),
        kind=KIND,
        kind_changed_at=(1, 0),
        earlier_kinds=(EarlierKind(Kind("print", "old", "int8", "words", "v1"), (1, 0)),),
    ),
    AbortRequested(3, "a"),
    Attached(4, "a"),
    Detached(5, "a"),
    StopWordFound(6, "a", 1, 3, "stop"),
    WorkerRegistered(7, b"w", "w", 1, KIND, 16, 100, 1000, 500, 8, 64, 1, 2, "cpu", "bf16", ("x", "y")),
    WeightsHashed(8, b"w", 70, "root", "blocks"),
    WorkerBeat(8, b"w", 70, 3, (1, 2, 3)),
    WorkerLeft(9, b"w", 70, "done", leaves_blocks=True),
    WorkerLost(9, b"w"),
    StepDone(10, b"w", 70, 4, [5, 6], [1, 1], ((0, Failure(3, "bad", "field")),), (), 8, 9, 4, 2),
    Turn(11),
    DrainStarted(12),
    WeightsChanged(13, "print", "root", "step-1"),
    GenerationPaused(14, PauseMode.RECOMPUTE),
    GenerationResumed(15),
    SleepSet(16, 2, is_held=True),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_restored_unchanged(event: Event) -> None:
    record = pb.Record.FromString(encode_record(event, Outcome.of([])).SerializeToString())
    assert decode_event(record) == event


def test_settings_are_restored_unchanged() -> None:
    values: dict[str, Any] = {
        item.name: {"str": "x", "bool": False}.get(str(item.type), number + 1)
        for number, item in enumerate(dataclasses.fields(CoreConfig))
    }
    config = CoreConfig(**values)
    assert decode_config(encode_config(config)) == config


class RecordedHarness(Harness):
    """A harness whose core is recorded."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(**settings)
        started = pb.RecordingStarted(
            capacity_policy=settings["capacity"], batching_type="inflight_fused", config=encode_config(self.config)
        )
        self.recorder = Recorder(path, started, self.now_ns)

    def handle(self, event: Event) -> list[Effect]:
        effects = super().handle(event)
        self.recorder.note(event, effects)
        return effects


def live(path: Path, seed: int = 1, capacity: str = "max_utilization") -> RecordedHarness:
    """Record a workload on two groups with preemptions, cancellations, deadlines, prefix reuse, and the death and
    shutdown of a worker.
    """
    rng = random.Random(seed)
    life = RecordedHarness(path, capacity=capacity, max_num_tokens=24)
    life.add_group("g", num_blocks=24, max_batch_size=6)
    life.add_group("h", num_blocks=24, max_batch_size=6)
    for number in range(60):
        prefix = list(range(7, 7 + rng.randint(0, 12)))
        own = [rng.randint(100, 900) for _ in range(rng.randint(1, 12))]
        deadline = life.now_ns + 30 * MS if number % 9 == 0 else None
        life.submit(f"r{number}", prefix + own, rng.randint(1, 30), is_detached=True, deadline_ns=deadline)
        life.turn()
        if number % 7 == 0:
            life.handle(AbortRequested(life.now_ns, f"r{number - 2}"))
        if number == 30:
            life.kill("h")  # `g` is silent in the meantime, so it is lost too
            for name in "gh":
                life.add_group(name, num_blocks=24, max_batch_size=6)
        if number == 45:
            life.leave("h")
        for group in list(life.groups.values()):
            if group.plans and rng.random() < 0.8:
                life.step(group.name)
        life.advance(rng.randint(0, 10))
    life.run()
    life.recorder.close()
    return life


def test_a_recording_replays_bit_for_bit(tmp_path: Path) -> None:
    life = live(tmp_path / "life")
    assert life.core.totals.num_preemptions > 0
    assert set(life.core.totals.num_finished_by_reason) == {"abort", "deadline", "length"}
    assert life.core.totals.num_worker_deaths == 2
    assert sum(life.core.totals.num_finished_by_reason.values()) == 60
    replayed = replay(tmp_path / "life")
    assert replayed.difference == ""
    assert replayed.num_plans == len(life.plans)
    assert replayed.measures.num_by_reason == life.core.totals.num_finished_by_reason
    assert run_replay([str(tmp_path / "life")]) == 0


def test_an_end_is_recorded_as_it_was_before_a_stop_word_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder's thread takes the events from its queue only after all of them have happened."""
    path, is_over = tmp_path / "life", threading.Event()
    life = RecordedHarness(path, capacity="max_utilization")
    waiting, take = life.recorder._waiting, life.recorder._waiting.get
    monkeypatch.setattr(waiting, "get", lambda: is_over.wait() and take())
    life.add_group()
    life.submit("a", 5, 4, is_detached=True)
    life.run()
    life.handle(StopWordFound(life.now_ns, "a", 0, 3, "stop"))
    is_over.set()
    life.recorder.close()
    (end,) = (end for record in read_recording(path) for ended in record.ends for end in ended.sequences)
    assert (end.reason, end.num_tokens, end.stop_word) == (FinishReason.LENGTH, 4, "")
    assert replay(path).difference == ""


def test_the_first_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "life", tmp_path / "other"
    live(path)
    records = list(read_recording(path))
    changed = next(record for record in records if record.plans and record.plans[0].block_ids)
    changed.plans[0].block_ids[0] += 1
    write(other, records)
    assert run_replay([str(other)]) == 1
    plan = changed.plans[0]
    text = capsys.readouterr().out
    assert f"event {records.index(changed)}, Turn at {changed.time_ns}" in text
    assert f"step {plan.step_id} of {plan.group_id}: block_ids was [{plan.block_ids[0]}" in text


def test_a_torn_tail_is_dropped_and_writing_continues_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "life"
    live(path, seed=1)
    num_events, whole = replay(path).num_events, path.read_bytes()
    path.write_bytes(whole[:-3])
    assert replay(path).num_events == num_events - 1
    life = live(path, seed=2)
    both = replay(path)
    assert both.difference == ""
    assert both.num_events > num_events + len(life.plans)


def test_bytes_that_turned_end_the_recording_there(tmp_path: Path) -> None:
    path = tmp_path / "life"
    live(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    records = list(read_recording(path))
    assert 0 < sum(len(record.SerializeToString()) + 8 for record in records) <= len(data) // 2


def test_a_file_of_another_kind_is_rejected_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("these are my notes and not a recording")
    with pytest.raises(ConfigError, match="not a recording"):
        Recorder(path, pb.RecordingStarted(), 0)
    assert path.read_text() == "these are my notes and not a recording"
    assert run_replay([str(path)]) == 2
    assert run_replay([str(tmp_path / "nowhere")]) == 2


def test_recording_stops_and_serving_goes_on_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "life", pb.RecordingStarted(), 0)
    recorder._file.close()
    recorder._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 (the recorder closes it)
    for number in range(1000):
        recorder.note(Turn(number), [])
    recorder.close()
    assert [record.message for record in caplog.records] == ["recording stopped"]
    assert len(list(read_recording(tmp_path / "life"))) == 1


def test_what_if_simulates_other_policies_and_pools(tmp_path: Path) -> None:
    path = tmp_path / "life"
    live(path)
    recorded = replay(path, keep_outside=True)
    same = simulate(recorded, Changes())
    roomy = simulate(recorded, Changes(policy="guaranteed_no_evict", num_blocks=400))
    assert roomy.num_preemptions == 0 < same.num_preemptions
    assert sum(roomy.num_by_reason.values()) == sum(recorded.measures.num_by_reason.values()) == 60
    assert roomy.max_kv_use < same.max_kv_use


def test_what_if_simulates_beam_searches_of_the_recorded_length(tmp_path: Path) -> None:
    path = tmp_path / "life"
    life = RecordedHarness(path, capacity="max_utilization")
    life.add_group(num_blocks=60, max_batch_size=8)
    for number in range(12):
        width = 1 + number % 4
        spec = {"beam_width": width, "early_stopping": number % 3, "stop_token_ids": frozenset({999})}
        life.submit(f"r{number}", [5, 6, 7 + number], 20, is_detached=True, **spec)
    life.run()
    life.recorder.close()
    recorded = replay(path, keep_outside=True)
    assert recorded.measures.num_by_reason == {"length": 3, "stop": 9}
    for changes in (Changes(), Changes(policy="guaranteed_no_evict", num_blocks=400), Changes(max_batch_size=4)):
        simulated = simulate(recorded, changes)
        assert simulated.num_by_reason == recorded.measures.num_by_reason
        assert simulated.num_output_tokens == recorded.measures.num_output_tokens


def test_a_changed_policy_gives_a_table_and_a_plot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "life", tmp_path / "plot.svg"
    live(path)
    words = [str(path), "--policy", "static_batch", "--max-num-tokens", "8", "--plot", str(picture)]
    assert run_replay(words) == 0
    text = capfd.readouterr().out
    assert "all as recorded" in text
    assert "policy static_batch" in text
    assert "max_num_tokens 8" in text
    assert picture.read_text().startswith("<?xml")


def with_steps_of_10_ms(recorded: Replay) -> Replay:
    recorded.steps = StepTimes()
    recorded.steps.add(0, 0, 10_000)
    return recorded


def test_a_worker_dies_in_a_simulation_and_comes_back(tmp_path: Path) -> None:
    """A step takes 10 ms, so a death after 25 ms interrupts the third. The successor, back after 100 ms, computes the
    prompt and two tokens again with the step of the third token.
    """
    path = tmp_path / "life"
    life = RecordedHarness(path, capacity="guaranteed_no_evict")
    life.add_group("g", num_blocks=24)
    life.submit("r", [5, 6, 7], 5, is_detached=True)
    life.run()
    life.recorder.close()
    recorded = with_steps_of_10_ms(replay(path, keep_outside=True))
    undisturbed = simulate(recorded, Changes())
    assert [round(ns / MS) for ns in (*undisturbed.first_token_ns, *undisturbed.end_to_end_ns)] == [10, 50]
    died = simulate(recorded, Changes(kill=(Kill.parse("g@25ms-100ms"),)))
    assert died.num_by_reason == {"length": 1}
    assert died.first_token_ns == undisturbed.first_token_ns
    assert [round(ns / MS) for ns in died.end_to_end_ns] == [130]
    assert died.percentile_ns("itl", 0.99) == pytest.approx(90 * MS, rel=0.01)
    assert died.percentile_ns("itl", 0.5) == pytest.approx(10 * MS, rel=0.01)


def test_more_workers_shorten_the_wait(tmp_path: Path) -> None:
    """Twelve requests of ten tokens, two at a time: a worker needs 100 ms for two of them."""
    path = tmp_path / "life"
    life = RecordedHarness(path, capacity="guaranteed_no_evict")
    life.add_group("g", num_blocks=40, max_batch_size=2)
    for number in range(12):
        life.submit(f"r{number}", [5, 6, number], 10, is_detached=True)
    life.run()
    life.recorder.close()
    recorded = with_steps_of_10_ms(replay(path, keep_outside=True))
    last_s = {}
    for count, dead in ((1, 0), (2, 0), (3, 0), (6, 0), (6, 3)):
        kills = tuple(Kill(f"worker-{number}", 45 * MS) for number in range(dead))
        simulated = simulate(recorded, Changes(workers=count, kill=kills))
        assert simulated.num_by_reason == {"length": 12}
        last_s[count, dead] = round(max(simulated.end_to_end_ns) / MS / 1_000, 2)
    # After 45 ms, the requests of three workers have four tokens each; the other workers have room after 100 ms.
    assert last_s == {(1, 0): 0.6, (2, 0): 0.3, (3, 0): 0.2, (6, 0): 0.1, (6, 3): 0.16}


def test_the_exit_status_tells_whether_objectives_are_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "life")
    live(tmp_path / "life")
    assert run_replay([path, "--slo", "p95_ttft=10m", "--slo", "p99_itl=10m"]) == 0
    assert run_replay([path, "--slo", "p95_ttft=10m", "--slo", "p50_e2e=1us"]) == 3
    (line,) = (line.split() for line in capsys.readouterr().out.splitlines() if "p50_e2e" in line)
    assert (line[1], line[-1]) == ("0.001", "missed")
    assert run_replay([path, "--workers", "2", "--kill", "worker-1@5ms-9ms", "--slo", "p95_e2e=10m"]) == 0
    shown = capsys.readouterr().out
    assert "workers 2" in shown
    assert "kill worker-1@0.005s-0.009s" in shown
    assert "step times are fitted to" in shown
    assert run_replay([path, "--workers", "2", "--kill", "worker-2@5ms"]) == 2
    assert "--kill: worker-2@0.005s: no such worker is registered at that time, only worker-0, worker-1" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--slo", "ttft=5s", "'ttft=5s' is not pNN_NAME=TIME"),
        ("--slo", "p95_ttft=5", "'5' is not a time such as 80ms or 1.5s"),
        ("--slo", "p95_tpot=5s", "names are ttft, itl and e2e"),
        ("--kill", "worker-0", "'worker-0' is not NAME@TIME"),
        ("--kill", "worker-0@5", "'5' is not a time"),
        ("--kill", "worker-0@5s-4s", "must come back after its death"),
    ],
)
def test_invalid_changes_are_named(flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_replay(["life", flag, value])
    assert message in capsys.readouterr().err


def test_the_error_of_the_fitted_times_is_known() -> None:
    steps = StepTimes()
    for duration_us in (80, 100, 100, 120):
        steps.add(0, 0, duration_us)
    # The fit is their mean, 100 us, which is wrong by 0, 0, a sixth and a quarter.
    assert steps.error_of(steps.fit.model()) == pytest.approx((1 / 6, 1 / 4, 0.0), abs=1e-3)


def write(path: Path, records: list[pb.Record]) -> None:
    """Write a recording that contains these records."""
    path.write_bytes(b"".join(frame(record) for record in records))


def test_a_simulation_warns_of_steps_beyond_the_recorded_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded steps have at most 24 context tokens and 6 rows."""
    live(tmp_path / "life")
    words = ["--cost-from", str(tmp_path / "life"), "--request-rate", "20", "--duration", "2"]
    assert run_simulate([*words, "--max-num-tokens", "16", "--max-batch-size", "2"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert run_simulate([*words, "--num-workers", "1", "2"]) == 0
    first, second = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert re.search(r"with 1 worker, steps have up to \d+ prompt tokens, while the recording has at most 24", first)
    assert "with 2 workers, " in second
    assert run_simulate(["--request-rate", "20", "--duration", "1"]) == 0  # nothing was recorded
    assert "warning" not in capsys.readouterr().err
