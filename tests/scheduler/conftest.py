from __future__ import annotations

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 100
DEFAULT_SEEDS = 200
DEFAULT_COMBINATIONS = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples", type=int, default=DEFAULT_EXAMPLES, help="Number of runs of each state machine (scheduler tests)."
    )
    parser.addoption(
        "--seeds",
        type=int,
        default=DEFAULT_SEEDS,
        help="Number of seeded runs of the scheduler core with random events.",
    )
    parser.addoption(
        "--combinations",
        type=int,
        default=DEFAULT_COMBINATIONS,
        help="Number of random combinations of settings to run the scheduler core with.",
    )
    parser.addoption("--first-seed", type=int, default=0, help="First seed.")


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--examples", default=DEFAULT_EXAMPLES)
    # The runs are the same each time, unless more than the default number is requested.
    settings.register_profile(
        "scheduler", max_examples=examples, derandomize=examples == DEFAULT_EXAMPLES, database=None
    )
