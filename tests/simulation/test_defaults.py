"""The simulation runs what `midstream up` runs: the same classes and, except for those named here, settings."""

from __future__ import annotations

import dataclasses
import random

from midstream.cli.topology import Topology, plan_processes
from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, parse_config
from midstream.rpc.frames import FrameServer
from midstream.rpc.http2 import GrpcServer
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.threaded import ThreadedJournal
from scheduler.service import SchedulerService
from tests.simulation.cluster import Shape
from tests.simulation.run import run_seed
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import SCENARIOS, Scenario, scenario_of
from tests.simulation.test_kinds import mixed
from tests.simulation.workload import jobs

# Names and addresses of the simulated machines.
NAMES = {"name", "host", "http_port", "schedulers", "detokenizers", "journal_path"}
# Shorter, so that a run lasts seconds of virtual time.
TIMES = {"heartbeat_interval_ms", "worker_timeout_ms", "worker_progress_timeout_ms", "drain_timeout_s"}
# Smaller, so that short requests have several blocks.
SIZES = {"tokens_per_block"}
# What single scenarios vary.
VARIED = {
    *("capacity_policy", "enable_block_reuse", "max_batch_size", "max_context_chunk", "max_num_tokens"),
    *("max_pending_bytes", "max_queue_size", "max_worker_deaths", "no_worker_timeout_s"),
}

Config = SchedulerConfig | DetokenizerConfig | RouterConfig
CLASSES: dict[str, type[Config]] = {
    "scheduler": SchedulerConfig,
    "detokenizer": DetokenizerConfig,
    "router": RouterConfig,
}


def shipped() -> dict[str, Config]:
    """Return the configuration of each service as `midstream up` starts it, without variables."""
    specs = plan_processes(Topology(), 2, lambda _: True, journal_path="run/journal")
    return {
        spec.kind: parse_config(CLASSES[spec.kind], ("--name", spec.name, *spec.flags), {}, program=spec.kind)
        for spec in specs
        if spec.kind in CLASSES
    }


def simulated(shape: Shape) -> dict[str, Config]:
    return {
        "scheduler": shape.scheduler_config(),
        "detokenizer": shape.detokenizer_config("detokenizer-0"),
        "router": shape.router_config("router-0"),
    }


def differing(one: Config, other: Config) -> set[str]:
    return {item.name for item in dataclasses.fields(one) if getattr(one, item.name) != getattr(other, item.name)}


def shapes() -> list[Shape]:
    """Return the shapes of all scenarios, several times because some settings are drawn."""
    scenario_of(0, random.Random(0))  # registers them
    makes = [*SCENARIOS.values(), mixed]
    return [make(random.Random(seed)).shape for make in makes for seed in range(20)]


def test_the_settings_are_the_defaults_except_for_those_named_above() -> None:
    defaults = shipped()
    found = {
        name
        for shape in shapes()
        for kind, config in simulated(shape).items()
        for name in differing(config, defaults[kind])
    }
    assert found == NAMES | TIMES | SIZES | VARIED


def test_the_scheduler_has_the_classes_that_are_shipped() -> None:
    """The simulation passes other arguments to these classes, but replaces none of them."""
    services: list[SchedulerService] = []

    async def inject(simulation: RunningSimulation) -> None:
        service = simulation.cluster.service
        assert service is not None
        services.append(service)

    outcome = run_seed(0, make=lambda dice: Scenario(jobs=jobs(dice, 1), inject=inject))
    assert not outcome.problems
    (service,) = services
    assert type(service.journal) is ThreadedJournal
    assert type(service.journal._store) is LogStore
    assert type(service.journal._store._folder) is LogFolder
    assert type(service.frames) is FrameServer
    assert type(service.server.grpc) is GrpcServer
