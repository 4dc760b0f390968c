"""Scenarios in which clients disconnect, miss deadlines, read slowly, send too many requests, or repeat a request."""

from __future__ import annotations

import random

from midstream.errors import AlreadyExistsError, DeadlineError, OverloadedError
from protos import generation_pb2 as pb
from tests.simulation.cluster import Shape
from tests.simulation.loop import START_S
from tests.simulation.running_simulation import RunningSimulation
from tests.simulation.scenarios import Scenario, scenario
from tests.simulation.workload import Job, jobs, long_request, request

# Time at which clients start, on the simulation's clock.
_CLIENTS_START_S = 0.5


@scenario(12)
def client_leaves(dice: random.Random) -> Scenario:
    """A client leaves while its request is queued, in prefill or in decode: the request is aborted within a second and
    counted once.
    """
    leaving: list[Job] = []
    for number in range(3):
        job = Job(long_request(dice, number, dice.choice((4, 60)), 200), start_s=dice.uniform(0, 0.1))
        if dice.random() < 0.5:
            job.leaves_after = dice.randint(1, 12)
        else:
            job.leaves_at_s = 0.5 + job.start_s + dice.uniform(0.003, 0.3)
        leaving.append(job)

    def judge(simulation: RunningSimulation) -> None:
        engine = simulation.cluster.engine
        assert engine is not None
        for job in leaving:
            known = engine.core.lifecycle.requests.get(job.request.request_id)
            if known is None or not job.has_left:
                continue
            simulation.happened["12"] += 1
            if simulation.checker.finishes[job.request.request_id] != ["ABORT"]:
                simulation.problems.append(f"it ended as {simulation.checker.finishes[job.request.request_id]}")
            if known.times.finished_ns / 1e9 - START_S > job.ended_s + 1.0:
                simulation.problems.append("the request of a disconnected client kept running")

    shape = Shape(num_workers=1, num_blocks=256, scheduler={"max_batch_size": 3, "max_context_chunk": 8})
    return Scenario(shape=shape, jobs=[*leaving, *[Job(request(dice, 5 + i)) for i in range(2)]], judge=judge)


@scenario(13)
def deadline_passes(dice: random.Random) -> Scenario:
    """A request whose deadline expires in the queue never runs. One whose deadline expires in decode keeps its output
    so far, and its blocks are freed.
    """
    in_queue = dice.random() < 0.5
    late = [
        Job(long_request(dice, number, 5, 40), timeout_s=dice.uniform(0.3, 0.8), must_complete=False)
        for number in range(2)
    ]
    others = [Job(request(dice, 5 + number)) for number in range(2)]

    async def inject(simulation: RunningSimulation) -> None:
        if in_queue:
            await simulation.sleep(1.0, 1.5)
            simulation.cluster.start("worker-0")

    def judge(simulation: RunningSimulation) -> None:
        engine = simulation.cluster.engine
        assert engine is not None
        for job in late:
            simulation.happened["13 queue" if in_queue else "13 decode"] += 1
            if not isinstance(job.error, DeadlineError):
                simulation.problems.append(f"after its deadline it ended with {job.error!r}")
            known = engine.core.lifecycle.requests.get(job.request.request_id)
            if known is not None and in_queue and known.times.first_scheduled_ns:
                simulation.problems.append("a worker ran a request after its deadline")
            if simulation.checker.finishes.get(job.request.request_id, ["DEADLINE"]) != ["DEADLINE"]:
                simulation.problems.append(f"it ended as {simulation.checker.finishes[job.request.request_id]}")

    shape = Shape(num_workers=0 if in_queue else 1, step_s=0.01 if in_queue else 0.05)
    return Scenario(shape=shape, jobs=[*late, *others], inject=inject, judge=judge)


@scenario(14)
def slow_reader(dice: random.Random) -> Scenario:
    """A client that reads too slowly is disconnected; others are not affected."""
    slow = Job(long_request(dice, 0, 5, 60), pause_s=dice.uniform(0.3, 0.6), must_complete=False)

    def judge(simulation: RunningSimulation) -> None:
        simulation.happened["14"] += isinstance(slow.error, OverloadedError)
        if slow.error is not None and not isinstance(slow.error, OverloadedError):
            simulation.problems.append(f"the slow reader ended with {slow.error!r}")
        quick = max(job.ended_s for job in simulation.jobs if job is not slow)
        if quick > 3.0:
            simulation.problems.append(f"the other clients were only served after {quick} s")

    shape = Shape(window=1, router={"max_pending_bytes": dice.choice((400, 500))})
    return Scenario(shape=shape, jobs=[slow, *[Job(long_request(dice, 1 + i, 6, 12)) for i in range(3)]], judge=judge)


@scenario(15)
def overload(dice: random.Random) -> Scenario:
    """There are more requests than the service has capacity for: some are rejected at once with a retry hint, and
    admitted requests complete.
    """
    work = [Job(request(dice, number), start_s=dice.uniform(0, 0.05), must_complete=False) for number in range(20)]

    def judge(simulation: RunningSimulation) -> None:
        for job in work:
            if job.error is None:
                job.check_complete()
                simulation.problems.extend(job.problems)
            elif not isinstance(job.error, OverloadedError) or job.error.retry_after_ms < 1:
                simulation.problems.append(f"rejected with {job.error!r}")
            else:
                simulation.happened["15"] += 1
                if job.ended_s > 1.5:
                    simulation.problems.append(f"rejected only after {job.ended_s} s")

    shape = Shape(num_workers=1, scheduler={"max_queue_size": 2, "max_batch_size": 3})
    return Scenario(shape=shape, jobs=work, judge=judge)


@scenario(19)
def same_id_twice(dice: random.Random) -> Scenario:
    """A request with a known id attaches to the first request if its contents are the same; otherwise it is
    rejected.
    """
    first = Job(long_request(dice, 0, 6, 20))
    again = Job(_copy(first.request), start_s=dice.uniform(0, 0.6))
    other = Job(_copy(first.request), start_s=dice.uniform(0.1, 0.6), must_complete=False)
    other.request.sampling.seed += 1

    def judge(simulation: RunningSimulation) -> None:
        simulation.happened["19"] += 1
        if not isinstance(other.error, AlreadyExistsError):
            simulation.problems.append(f"a request with the same id and other contents ended with {other.error!r}")
        if simulation.checker.finishes["r0"] != ["LENGTH"]:
            simulation.problems.append(f"it ended as {simulation.checker.finishes['r0']}")

    return Scenario(jobs=[first, again, other, *jobs(dice, 3)[1:]], judge=judge)


@scenario(23)
def hoarder(dice: random.Random) -> Scenario:
    """One client requests twice the capacity of a worker; the small requests of another client are still served."""
    hoards = [Job(long_request(dice, number, 4, 40)) for number in range(2)]
    for hoard in hoards:
        hoard.request.client_id = "hoarder"
        hoard.request.sampling.num_return_sequences = 4
        hoard.__post_init__()  # recomputes the expected output from the request
    small = [Job(long_request(dice, 2 + i, 5, 5), start_s=dice.uniform(0.05, 1.0)) for i in range(4)]
    for job in small:
        job.request.client_id = "other"
    is_quiet = dice.random() < 0.5

    async def inject(simulation: RunningSimulation) -> None:
        if not is_quiet and await simulation.at(simulation.messages(20, 200)):
            name = dice.choice(("worker-0", "scheduler"))
            simulation.kill(name)
            await simulation.restart(name)

    def judge(simulation: RunningSimulation) -> None:
        simulation.happened["28"] += 1
        longest_s = max(job.ended_s - _CLIENTS_START_S - job.start_s for job in small)
        if is_quiet and longest_s > 0.6:  # one of the large outputs may have to end first
            simulation.problems.append(f"a small request took {longest_s:.3f} s next to large requests")

    # 44 tokens take 11 blocks, so at most four outputs fit at a time.
    scheduler = {"capacity_policy": dice.choice(("guaranteed_no_evict", "max_utilization")), "max_worker_deaths": 100}
    scheduler["enable_block_reuse"] = dice.random() < 0.5
    shape = Shape(num_workers=1, num_blocks=44, scheduler=scheduler)
    return Scenario(shape=shape, jobs=[*hoards, *small], inject=inject, judge=judge)


def _copy(original: pb.GenerateRequest) -> pb.GenerateRequest:
    result = pb.GenerateRequest()
    result.CopyFrom(original)
    return result
