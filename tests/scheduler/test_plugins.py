from __future__ import annotations

import importlib
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


@pytest.fixture
def installed_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package, built and installed where only this test looks."""
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


def test_policies_come_by_name() -> None:
    scheduler = load_scheduler("", "max_utilization", "inflight")
    assert isinstance(scheduler, SimpleScheduler)
    assert isinstance(scheduler.capacity_scheduler, MaxUtilization)
    assert isinstance(scheduler.micro_batch_scheduler, Inflight)


def test_a_plugin_that_nobody_offers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no installed package offers 'mine'") as caught:
        load_scheduler("mine", "max_utilization", "inflight")
    assert caught.value.field == "scheduler_plugin"
