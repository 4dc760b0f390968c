"""The cost of a token, counted instead of timed: messages between components, and callbacks of their event loops."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.journal.threaded import ThreadedJournal
from tests.simulation.cluster import Shape
from tests.simulation.loop import PROCESS, Process, VirtualLoop
from tests.simulation.run import run_seed
from tests.simulation.scenarios import Scenario
from tests.simulation.worker import SimulatedLink
from tests.simulation.workload import Job, long_request

NUM_REQUESTS, NUM_TOKENS = 24, 120
# Allowance for prefill steps, calls, the start and end of streams, and messages that do not arrive in one piece.
MARGIN = 60


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return counts of the tasks and callbacks of each component, of commits, and of the times that the thread of a
    worker's connection is woken.
    """
    counts = Counter[str]()
    call_soon, adopt, commit = VirtualLoop.call_soon, Process.adopt, ThreadedJournal.commit
    wake = SimulatedLink._wake

    def count_callback(loop: VirtualLoop, callback: object, *args: object, context: object = None) -> object:
        process = PROCESS.get()
        if process is not None and context is None:
            counts[f"callbacks of {process.name.partition('-')[0]}"] += 1
        return call_soon(loop, callback, *args, context=context)

    def count_task(process: Process, task: object) -> None:
        counts[f"tasks of {process.name.partition('-')[0]}"] += 1
        adopt(process, task)  # type: ignore[arg-type]

    def count_commit(journal: ThreadedJournal, entries: object, then: object) -> None:
        counts["commits"] += 1
        commit(journal, entries, then)  # type: ignore[arg-type]

    def count_wake(link: SimulatedLink) -> None:
        counts["wakes of a link's thread"] += 1
        wake(link)

    monkeypatch.setattr(ThreadedJournal, "commit", count_commit)
    monkeypatch.setattr(SimulatedLink, "_wake", count_wake)
    monkeypatch.setattr(VirtualLoop, "call_soon", count_callback)
    monkeypatch.setattr(Process, "adopt", count_task)
    return counts


def many_streams(dice: random.Random) -> Scenario:
    work = [Job(long_request(dice, number, 4, NUM_TOKENS)) for number in range(NUM_REQUESTS)]
    return Scenario(shape=Shape(num_workers=1, num_blocks=512), jobs=work)


def test_the_number_of_messages_per_step_does_not_depend_on_the_streams(made: Counter[str]) -> None:
    outcome = run_seed(3, trace=True, make=many_streams)
    assert not outcome.problems
    sent = Counter[tuple[str, str]]()
    for line in outcome.trace:
        words = line.split()
        if words[3:5] == ["frames", "data"]:
            sent[words[1].partition("-")[0].partition("#")[0], words[2].partition("-")[0].partition("#")[0]] += 1
    # These are results and heartbeats of the worker.
    num_steps = sum(line.split()[1:4] == ["worker-0#1", "scheduler#0", "zmq"] for line in outcome.trace)
    assert num_steps < 3 * NUM_TOKENS, "each step has tokens of several streams"
    assert sent["scheduler", "detokenizer"] <= num_steps + MARGIN
    assert sent["detokenizer", "router"] <= sent["scheduler", "detokenizer"] + MARGIN
    # These are attach and detach commands, combined per iteration of the loop.
    assert sent["detokenizer", "scheduler"] <= NUM_REQUESTS + MARGIN
    assert sent["router", "detokenizer"] <= NUM_REQUESTS + MARGIN
    # Messages and submissions need no tasks; the router's tasks are those of its calls. Callbacks do not increase with
    # the number of messages.
    assert made["tasks of scheduler"] <= MARGIN
    assert made["tasks of detokenizer"] <= MARGIN
    assert made["callbacks of detokenizer"] <= MARGIN
    # The turn after a result, and the feed's batch after the commit, need no additional iteration of the event loop.
    assert made["callbacks of scheduler"] <= MARGIN
    assert made["commits"] <= num_steps + MARGIN
    # The compute loop sends its results itself, without the thread.
    assert made["wakes of a link's thread"] <= MARGIN
