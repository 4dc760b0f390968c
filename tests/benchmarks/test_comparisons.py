"""Comparisons with the best peer use the best rounds of each peer, and the ratios within each round."""

from __future__ import annotations

import pytest

from benchmarks.peers.comparisons import COMPARISONS, Comparison, median_figure, ratio_of
from benchmarks.peers.peer import Figures
from benchmarks.peers.registry import PEERS
from benchmarks.peers.rounds import Measurement


def measured(peer: str, *speeds: float, gap_ms: float | None = None) -> list[Measurement]:
    gaps = None if gap_ms is None else (1.0, gap_ms)
    return [Measurement(n, peer, 0.0, Figures("mixed", speed, 1.0, None, gaps)) for n, speed in enumerate(speeds)]


def test_the_median_of_the_rounds_own_ratios() -> None:
    # The ratios within rounds are 100/50, 90/60 and 120/40. The ratio of the medians is 100/50 as well, but that of the
    # means is 310/150.
    ratio = ratio_of(
        Comparison("mixed", "a", ("b",), 1.0, 2.0), measured("a", 100, 90, 120) + measured("b", 50, 60, 40)
    )
    assert ratio is not None
    assert (ratio.median, ratio.lowest, ratio.highest, ratio.num_rounds) == (2.0, 1.5, 3.0, 3)


def test_the_ratio_of_the_best_rounds() -> None:
    ratio = ratio_of(Comparison("mixed", "a", ("b",), 1.0, 2.0), measured("a", 100, 150) + measured("b", 60, 40))
    assert ratio is not None
    assert ratio.best == 2.5


def test_the_best_peer_has_the_best_round() -> None:
    some = measured("a", 10, 10, 10) + measured("b", 1, 20, 1) + measured("c", 5, 5, 5)
    ratio = ratio_of(Comparison("mixed", "a", ("b", "c", "absent"), 1.0, 2.0), some)
    assert ratio is not None
    assert (ratio.peer, ratio.best, ratio.median) == ("b", 0.5, 10.0)


def test_rounds_that_only_one_finished_do_not_count() -> None:
    ratio = ratio_of(Comparison("mixed", "a", ("b",), 1.0, 2.0), measured("a", 10, 20) + measured("b", 10))
    assert ratio is not None
    assert (ratio.median, ratio.num_rounds) == (1.0, 1)


def test_a_quarter_of_the_gap_gives_a_ratio_of_four() -> None:
    some = measured("a", 1.0, gap_ms=25.0) + measured("b", 1.0, gap_ms=100.0)
    ratio = ratio_of(Comparison("mixed", "a", ("b",), 4.0, 6.0, is_gap=True), some)
    assert ratio is not None
    assert ratio.median == pytest.approx(4.0)


def test_half_the_processor_time_gives_a_ratio_of_two() -> None:
    def costing(peer: str, seconds: float) -> Measurement:
        return Measurement(0, peer, 9.0, Figures("mixed", 10.0, 1.0, processor_s=seconds))

    comparison = Comparison("mixed", "a", ("b",), 1.0, 2.0)
    ratio = ratio_of(comparison, [costing("a", 4.0), costing("b", 8.0)])
    assert ratio is not None
    assert (ratio.median, ratio.in_processor_time) == (1.0, 2.0)
    unknown = ratio_of(comparison, [costing("a", 4.0), costing("b", 0.0)])
    assert unknown is not None
    assert unknown.in_processor_time is None


def test_values_that_were_not_measured_are_omitted() -> None:
    comparison = Comparison("mixed", "a", ("b",), 1.0, 2.0)
    assert ratio_of(comparison, measured("a", 1.0)) is None
    assert ratio_of(comparison, measured("b", 1.0)) is None
    assert median_figure([], "a", "mixed") is None


def test_all_compared_values_are_measured() -> None:
    for comparison in COMPARISONS:
        assert comparison.workload in PEERS[comparison.ours].workloads
        assert any(name in PEERS and comparison.workload in PEERS[name].workloads for name in comparison.peers)
