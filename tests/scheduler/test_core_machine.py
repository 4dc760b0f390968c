"""Random runs of the core: blocks are conserved, each request ends once, no token is lost or duplicated, and no request
starves.

Hypothesis shrinks failures; the seeded runs cover many more states. A failing seed is printed and can be run alone:
pytest tests/scheduler/test_core_machine.py --first-seed 1234 --seeds 1
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from tests.scheduler.core_driver import NUM_BLOCKS, CoreDriver, Shape

BEGINNINGS = (
    sorted(CAPACITY_SCHEDULERS),
    sorted(MICRO_BATCH_SCHEDULERS),
    [1, 2],
    # Only a few seeds use chunks smaller than a block, since these take three times as many steps.
    [3, 8, 8, 1000, 1000, 1000],
    [True, True, False],
    [0, 0, 6],
    [False, True],
    [False, True],
)
# The possible values of Shape's fields, in order.
SHAPE = (
    [0, 4, 10, 20, 20],
    [1, 2, 3, 4, 9],
    [1, 2, 5, 9, 12],
    [1, 1, 1, 2, 3],
    [0, 0, 1],
    ["", "", "", "salt"],
    [None, None, None, 50],
    [True, True, False],
    [1, 1, 1, 1, 2, 3],
    [0, 0, 0, 1, 4],
)
SHAPES = st.builds(Shape, *(st.sampled_from(choices) for choices in SHAPE))
KINDS = ["abort", "abort", "attach", "detach"]
CHANGES = ["join", "join", "leave", "again"]


class CoreMachine(RuleBasedStateMachine):
    driver: CoreDriver | None = None

    @initialize(chosen=st.tuples(*(st.sampled_from(choices) for choices in BEGINNINGS)))
    def begin(self, chosen: tuple[str, str, int, int, bool, int, bool, bool]) -> None:
        self.driver = CoreDriver(*chosen)

    @rule(shapes=st.lists(SHAPES, min_size=1, max_size=3))
    def submit(self, shapes: list[Shape]) -> None:
        assert self.driver is not None
        self.driver.submit(shapes)

    @rule(pick=st.integers(0, 9), twice=st.booleans())
    def step(self, pick: int, twice: bool) -> None:
        assert self.driver is not None
        self.driver.step(pick, twice)

    @rule(pick=st.integers(0, 99), kind=st.sampled_from(KINDS), num_back=st.integers(0, 3))
    def somebody_comes_or_goes(self, pick: int, kind: str, num_back: int) -> None:
        assert self.driver is not None
        self.driver.somebody_comes_or_goes(pick, kind)
        if num_back == 3:
            self.driver.stop_word(pick, num_back)

    @rule(name=st.sampled_from("gh"), kind=st.sampled_from(CHANGES))
    def group_changes(self, name: str, kind: str) -> None:
        assert self.driver is not None
        self.driver.group_changes(name, kind, NUM_BLOCKS)

    @rule(swap=st.booleans())
    def time_passes(self, swap: bool) -> None:
        assert self.driver is not None
        if swap:
            self.driver.results_change_places()
        self.driver.time_passes()

    @invariant()
    def blocks_are_conserved(self) -> None:
        if self.driver is not None:
            self.driver.harness.check()

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.end()


def live(seed: int) -> None:
    """Run the core with random choices, all of which the seed determines."""
    draw = random.Random(seed)
    driver = CoreDriver(*(draw.choice(choices) for choices in BEGINNINGS))  # type: ignore[arg-type]
    for _ in range(30):
        what = draw.random()
        if what < 0.2:
            driver.submit([Shape(*(draw.choice(choices) for choices in SHAPE)) for _ in range(draw.randint(1, 3))])  # type: ignore[arg-type]
        elif what < 0.7:
            driver.step(draw.randrange(10), draw.random() < 0.1)
        elif what < 0.82:
            driver.somebody_comes_or_goes(draw.randrange(100), draw.choice(KINDS))
        elif what < 0.87:
            driver.stop_word(draw.randrange(100), draw.randrange(4))
        elif what < 0.91:
            driver.group_changes(draw.choice("gh"), draw.choice(CHANGES), draw.choice([NUM_BLOCKS, 2 * NUM_BLOCKS]))
        elif what < 0.95:
            driver.results_change_places()
        else:
            driver.time_passes()
        driver.harness.check()
    driver.end()


@pytest.mark.timeout(600)
def test_short_schedules_keep_the_invariants() -> None:
    chosen = settings(
        settings.get_profile("scheduler"),
        stateful_step_count=20,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    run_state_machine_as_test(CoreMachine, settings=chosen)


@pytest.mark.timeout(3600)
def test_seeded_schedules_keep_the_invariants(request: pytest.FixtureRequest) -> None:
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + request.config.getoption("--seeds")):
        try:
            live(seed)
        except BaseException:
            print(f"pytest tests/scheduler/test_core_machine.py --first-seed {seed} --seeds 1")
            raise
