from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from midstream.errors import ConfigError
from scheduler.core.capacity_scheduler import MaxUtilization
from scheduler.core.micro_batch_scheduler import Inflight
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.plugins import load_scheduler
from tests.example_package import install
from tests.scheduler.harness import Harness

EXAMPLE = Path(__file__).parent / "example_plugin"


SHORTEST_FIRST = Path(__file__).parent / "shortest_first"


@pytest.fixture
def shortest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example package `shortest_first`."""
    monkeypatch.syspath_prepend(install(SHORTEST_FIRST, tmp_path))
    importlib.invalidate_caches()


@pytest.fixture
def installed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the example package and install it where only this test can find it."""
    monkeypatch.syspath_prepend(install(EXAMPLE, tmp_path))
    importlib.invalidate_caches()


@pytest.mark.usefixtures("installed_example")
def test_an_installed_package_brings_its_own_policy() -> None:
    harness = Harness(scheduler=load_scheduler("one_at_a_time", "max_utilization", "inflight_fused"))
    harness.add_group()
    for request_id in "ab":
        harness.submit(request_id, 3, 2)
    harness.run()
    harness.check_is_empty()
    assert harness.plans == ["+a[0:3]", "a", "+b[0:3]", "b"]


def test_policies_are_chosen_by_name() -> None:
    scheduler = load_scheduler("", "max_utilization", "inflight")
    assert isinstance(scheduler, SimpleScheduler)
    assert isinstance(scheduler.capacity_scheduler, MaxUtilization)
    assert isinstance(scheduler.micro_batch_scheduler, Inflight)


def test_a_plugin_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no installed package provides 'mine'") as caught:
        load_scheduler("mine", "max_utilization", "inflight")
    assert caught.value.field == "scheduler_plugin"


@pytest.mark.usefixtures("shortest_first")
def test_an_installed_package_sees_all_requests_and_reorders_those_that_wait() -> None:
    """There are 8 blocks of 4 tokens, and `a` needs 5 of them until its end. Only `d` fits at the same time; the others
    start later, in order of length.
    """
    harness = Harness(scheduler=load_scheduler("shortest_first", "max_utilization", "inflight_fused"))
    harness.submit("a", 12, 8)
    harness.add_group(num_blocks=8)
    harness.turn()
    harness.submit("b", 12, 6)
    harness.submit("c", 12, 4)
    harness.submit("d", 3, 2)
    harness.submit("e", 12, 5)
    harness.run()
    harness.check_is_empty()
    starts = [name for plan in harness.plans for name in re.findall(r"\+(\w)", plan)]
    assert len(harness.ended) == 5
    assert starts == ["a", "d", "c", "e", "b"]


@pytest.mark.usefixtures("shortest_first")
def test_clients_are_charged_for_what_a_policy_takes_from_the_middle() -> None:
    harness = Harness(scheduler=load_scheduler("shortest_first", "max_utilization", "inflight_fused"))
    harness.add_group(max_batch_size=1)
    for number, length in enumerate((20, 3, 9, 5)):
        harness.submit(f"{number}", length, 2, client_id="ab"[number % 2])
    harness.run()
    harness.check_is_empty()
    assert len(harness.ended) == 4
    assert len(harness.core.queue) == 0
    assert harness.core.queue.num_tokens == 0
