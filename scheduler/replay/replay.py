"""`python -m scheduler.replay FILE`: replays a recorded core.

Without changes every plan must be bit-identical to the recorded one. With changes ("what if"), results would differ, so
workers are simulated: with the recorded arrivals, outputs and aborts, and with step times from a cost model that is
fitted to the recorded steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from midstream.errors import ConfigError, MidstreamError
from protos import recording_pb2 as pb
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Effect, IterationDone, RequestEnded, StepPlan
from scheduler.core.events import Event, StepDone
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.plugins import load_scheduler
from scheduler.replay import shadow_run
from scheduler.replay.changes import Changes, Kill
from scheduler.replay.measures import Measures, plot, table
from scheduler.replay.objectives import Objective, objectives_table
from scheduler.replay.recording import read_recording
from scheduler.replay.recording_codec import Outcome, decode_config, decode_event, encode_outcome
from scheduler.replay.simulation import Script, Simulation, from_outside
from scheduler.replay.step_times import StepTimes
from scheduler.replay.time_line import TimeLine

T = TypeVar("T")


@dataclass(slots=True)
class Replay:
    """The outcome of a replay, with the recording's contents.

    Attributes:
        difference: The first difference; empty if there is none.
        outside: External events, for a simulation. scripts: The recorded output of each sequence.
        begin_ns: Start of the recording. duration_ns: Time from then to the last event.
        steps: The recorded steps' times, if the input of a simulation was collected.
    """

    started: pb.RecordingStarted = field(default_factory=pb.RecordingStarted)
    difference: str = ""
    num_events: int = 0
    num_plans: int = 0
    begin_ns: int = 0
    duration_ns: int = 0
    measures: Measures = field(default_factory=Measures)
    steps: StepTimes = field(default_factory=StepTimes)
    outside: list[Event] = field(default_factory=list)
    scripts: dict[tuple[str, int], Script] = field(default_factory=dict)


def replay(path: Path, *, keep_outside: bool = False, time_line: TimeLine | None = None) -> Replay:
    """Replay a recording in a core with the same settings, up to the first difference.

    Args:
        keep_outside: Whether to collect the input of a simulation, which takes memory for every request.
        time_line: Receives what happens to one token.

    Raises:
        ConfigError: The file is not a recording, or its scheduler plug-in is not installed.
    """
    result, core = Replay(), None
    for record in read_recording(path):
        if record.HasField("started"):
            core = make_core(record.started, decode_config(record.started.config))
            if not result.begin_ns:
                result.started, result.begin_ns = record.started, record.time_ns
            continue
        assert core is not None
        event = decode_event(record)
        if time_line is not None:
            time_line.before(core, event)
        effects = core.handle(event)
        if time_line is not None:
            time_line.after(core, event, effects)
        result.num_events += 1
        result.num_plans += len(record.plans)
        result.duration_ns = max(result.duration_ns, event.time_ns - result.begin_ns)
        result.difference = _difference(record, effects)
        if result.difference:
            result.difference = f"event {result.num_events}, {_kind(event)}: {result.difference}"
            break
        result.measures.note(effects)
        if keep_outside:
            _keep(result, event, effects)
    return result


def make_core(started: pb.RecordingStarted, config: CoreConfig) -> SchedulerCore:
    return SchedulerCore(
        config, load_scheduler(started.scheduler_plugin, started.capacity_policy, started.batching_type)
    )


def _difference(record: pb.Record, effects: list[Effect]) -> str:
    if not (record.plans or record.ends) and not any(isinstance(effect, StepPlan | RequestEnded) for effect in effects):
        return ""
    replayed = pb.Record()
    encode_outcome(Outcome.of(effects), replayed)
    if replayed.plans == record.plans and replayed.ends == record.ends:
        return ""
    for was, now in zip(record.plans, replayed.plans, strict=False):
        for item in was.DESCRIPTOR.fields:
            if getattr(was, item.name) != getattr(now, item.name):
                before, after = (str(getattr(plan, item.name)).replace("\n", " ") for plan in (was, now))
                return f"step {was.step_id} of {was.group_id}: {item.name} was {before}, is {after}"
    if len(record.plans) != len(replayed.plans):
        return f"{len(record.plans)} steps were recorded, but the replay planned {len(replayed.plans)}"
    was_ended, is_ended = ([end.request_id for end in ends] for ends in (record.ends, replayed.ends))
    return f"{was_ended} ended in the recording and {is_ended} in the replay, or their ends differ"


def _kind(event: Event) -> str:
    return f"{type(event).__name__} at {event.time_ns}"


def _keep(result: Replay, event: Event, effects: list[Effect]) -> None:
    taken = from_outside(event)
    if taken is not None:
        result.outside.append(taken)
    for effect in effects:
        if isinstance(effect, RequestEnded):
            for sequence in effect.sequences:
                assert sequence.end is not None
                stop_after = sequence.end.num_tokens if sequence.end.stop_word else None
                tokens = sequence.output[: sequence.end.num_tokens]
                result.scripts[effect.request.request_id, sequence.index] = Script(tokens, stop_after)
        elif isinstance(effect, IterationDone) and isinstance(event, StepDone):
            step = effect.stats.step
            duration_us = event.forward_us or step.latency_ns / 1_000
            result.steps.add(step.num_context_tokens, step.num_generation_requests, duration_us)


def simulate(recorded: Replay, changes: Changes) -> Measures:
    """Return the measurements of a simulation. Raises ConfigError if a change does not fit the recording."""
    started = pb.RecordingStarted()
    started.CopyFrom(recorded.started)
    started.capacity_policy = changes.policy or started.capacity_policy
    started.batching_type = changes.batching_type or started.batching_type
    core = make_core(started, changes.config(decode_config(started.config)))
    outside = changes.events(recorded.outside, recorded.begin_ns)
    simulation = Simulation(core, outside, cost=recorded.steps.fit.model(), scripts=recorded.scripts)
    simulation.run()
    return simulation.measures


def main(words: Sequence[str] | None = None) -> int:
    """Replay a file.

    Returns:
        1 if there is a difference, 2 if the file is not a recording or an argument does not fit it, 3 if the run with
        all changes, or the candidate, misses an objective.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="midstream replay", description="Replay a recorded scheduler core."
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="A recording made by `midstream scheduler --record FILE`."
    )
    parser.add_argument("--policy", choices=sorted(CAPACITY_SCHEDULERS), help="Simulate another capacity policy.")
    parser.add_argument(
        "--batching-type", choices=sorted(MICRO_BATCH_SCHEDULERS), help="Simulate another batching type."
    )
    for name, text in (
        ("max-num-tokens", "tokens in one step"),
        ("max-batch-size", "sequences in one step"),
        ("num-blocks", "KV blocks of each worker group"),
    ):
        parser.add_argument(
            f"--{name}", type=_positive, default=0, metavar="N", help=f"Simulate this number of {text}."
        )
    parser.add_argument(
        "--workers", type=_positive, default=0, metavar="N", help="Simulate this number of workers like the first one."
    )
    parser.add_argument(
        "--kill", type=_of(Kill.parse), action="append", default=[], metavar="NAME@TIME",
        help="Simulate the death of this worker, such as worker-0@12s; with worker-0@12s-20s it is back after 20 s.",
    )  # fmt: skip
    parser.add_argument(
        "--slo", type=_of(Objective.parse), action="append", default=[], metavar="pNN_NAME=TIME",
        help="Exit with 3 if this percentile is exceeded, such as p95_ttft=500ms, p99_itl=80ms or p95_e2e=5s.",
    )  # fmt: skip
    parser.add_argument("--request", metavar="ID", help="Print what happened to one token of this request, as JSON.")
    parser.add_argument("--at-token", type=int, default=0, metavar="N", help="With --request: the token's index. [0]")
    parser.add_argument("--sequence", type=int, default=0, metavar="I", help="With --request: the sequence. [0]")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Plot the run over time to a PNG or SVG file.")
    shadow_run.add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        return shadow_run.run(arguments) if arguments.shadow else _run(arguments)
    except MidstreamError as error:
        print(f"midstream replay: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    if arguments.request is not None:
        return _show_token(arguments)
    given = {name: getattr(arguments, name) for name in Changes.__slots__}
    changes = Changes(**given | {"kill": tuple(arguments.kill)})
    begin = time.perf_counter()
    recorded = replay(arguments.file, keep_outside=bool(changes))
    took_s = time.perf_counter() - begin
    if recorded.difference:
        console.print(f"differs at {recorded.difference}", markup=False)
        return 1
    speed = recorded.duration_ns / 1e9 / max(took_s, 1e-9)
    console.print(
        f"{recorded.num_events} events, {recorded.num_plans} plans, all as recorded; "
        f"{recorded.duration_ns / 1e9:.1f} s in {took_s:.1f} s, {speed:.0f} times real time"
    )
    columns = {"recorded": recorded.measures}
    if changes:
        if not recorded.steps:
            raise ConfigError("no step was recorded, so step times are unknown", field="FILE")
        typical, high, total = recorded.steps.error_of(recorded.steps.fit.model())
        console.print(
            f"step times are fitted to {len(recorded.steps)} recorded steps; error of a step: median {typical:.1%}, "
            f"95th percentile {high:.1%}; of their sum: {total:+.1%}"
        )
        columns["simulated\nas recorded"] = simulate(recorded, Changes())
        columns[str(changes)] = simulate(recorded, changes)
    console.print(table(columns))
    if arguments.slo:
        console.print(objectives_table(arguments.slo, columns))
    if arguments.plot:
        plot(columns, arguments.plot)
    last = list(columns.values())[-1]
    return 0 if all(objective.is_met(last) for objective in arguments.slo) else 3


def _show_token(arguments: argparse.Namespace) -> int:
    time_line = TimeLine(arguments.request, arguments.at_token, arguments.sequence)
    recorded = replay(arguments.file, time_line=time_line)
    print(json.dumps(time_line.to_json() | {"difference": recorded.difference}))
    return 1 if recorded.difference else 0


def _of(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the type of an argument; argparse shows the messages of its errors."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
