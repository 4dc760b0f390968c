from __future__ import annotations

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 100
DEFAULT_SEEDS = 400
DEFAULT_COMBINATIONS = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples", type=int, default=DEFAULT_EXAMPLES, help="Runs of each state machine (scheduler tests)."
    )
    parser.addoption("--seeds", type=int, default=DEFAULT_SEEDS, help="Seeded lives of the scheduler's core.")
    parser.addoption(
        "--combinations", type=int, default=DEFAULT_COMBINATIONS, help="Random settings of the scheduler's core."
    )
    parser.addoption("--first-seed", type=int, default=0, help="Where the seeds begin.")


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--examples", default=DEFAULT_EXAMPLES)
    # The same runs each time, unless more than the default number is requested.
    settings.register_profile(
        "scheduler", max_examples=examples, derandomize=examples == DEFAULT_EXAMPLES, deadline=None, database=None
    )
