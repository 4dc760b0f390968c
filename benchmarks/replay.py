"""Measure how fast a recording is replayed: a simulation of a worker with 256 occupied rows is recorded and then
replayed.

python -m benchmarks.replay
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from protos import recording_pb2 as pb
from scheduler.core.core import SchedulerCore
from scheduler.core.cost_model import CostModel
from scheduler.core.effects import Effect
from scheduler.core.events import Event
from scheduler.plugins import load_scheduler
from scheduler.replay.recording import frame
from scheduler.replay.recording_codec import Outcome, encode_config, encode_record
from scheduler.replay.replay import replay
from scheduler.replay.simulation import Simulation
from scheduler.replay.simulator import Fleet, Load, events_of


class RecordedCore(SchedulerCore):
    """Writes each event immediately, since a simulation runs faster than real time."""

    file: BinaryIO

    def handle(self, event: Event) -> list[Effect]:
        effects = super().handle(event)
        self.file.write(frame(encode_record(event, Outcome.of(effects))))
        return effects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="Recorded seconds. [60]")
    parser.add_argument("--request-rate", type=float, default=100.0, help="Requests per second. [100]")
    parser.add_argument("--step-us", type=float, default=15_000.0, help="Fixed cost of a step in microseconds. [15000]")
    arguments = parser.parse_args()
    fleet = Fleet()
    config = fleet.core("max_utilization", "inflight_fused", 100_000).config
    core = RecordedCore(config, load_scheduler("", "max_utilization", "inflight_fused"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        with path.open("wb") as core.file:
            started = pb.RecordingStarted(
                capacity_policy="max_utilization", batching_type="inflight_fused", config=encode_config(config)
            )
            core.file.write(frame(pb.Record(time_ns=1_000_000_000, started=started)))
            events = events_of(fleet, Load(arguments.request_rate, arguments.duration))
            Simulation(core, events, cost=CostModel(step_us=arguments.step_us)).run()
        begin = time.process_time()
        result = replay(path)
        took_s = time.process_time() - begin
        assert result.difference == ""
        rows = dict(result.measures.rows())
        size_mb, duration_s = path.stat().st_size / 1e6, result.duration_ns / 1e9
        print(f"{duration_s:.0f} s recorded, {result.num_plans} steps, {size_mb:.1f} MB")
        print(f"{rows['rows per step, mean']} rows per step, {rows['output tokens per s']} tokens per second")
        print(f"replayed in {took_s:.1f} s, {duration_s / took_s:.0f} times real time")


if __name__ == "__main__":
    main()
