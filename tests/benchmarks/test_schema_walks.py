"""Walks through the grammars of random schemas; `make check-schemas` runs many more."""

from __future__ import annotations

from benchmarks.json_schema.walks import run


def test_every_walk_ends_in_a_value_that_two_validators_accept() -> None:
    counts, problems = run(num_schemas=40, num_walks=5, seed=1)
    assert problems == []
    assert (counts["schemas"], counts["walks"]) == (40, 200)
    assert counts["unfinished"] < 20
