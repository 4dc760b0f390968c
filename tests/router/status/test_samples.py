from __future__ import annotations

import pytest

from protos import status_pb2
from router.status.samples import HISTORY_S, Samples, quantile

BOUNDS = [10.0, 20.0, 40.0]


def cell(
    *, epoch: int = 1, generated: int = 0, prompt: int = 0, steps: int = 0, first: tuple[int, ...] = (0, 0, 0, 0)
) -> status_pb2.CellStatus:
    durations = status_pb2.DurationCounts(bounds_ms=BOUNDS, counts=first)
    return status_pb2.CellStatus(
        cell="a",
        scheduler_epoch=epoch,
        requests=status_pb2.RequestCounts(num_queued=1, num_paused=2, num_context=3, num_generation=4),
        groups=[
            status_pb2.GroupStatus(group_id="w", epoch=epoch, num_steps=steps, num_blocks=8, num_held_blocks=2),
        ],
        counts=status_pb2.CountsSinceStart(num_generated_tokens=generated, num_prompt_tokens=prompt),
        time_to_first_token=durations,
    )


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([4, 0, 0, 0], 0.5, 5.0),  # half of the first bucket, which covers 0 to 10
        ([0, 4, 0, 0], 0.25, 12.5),
        ([2, 2, 0, 0], 0.5, 10.0),
        ([2, 0, 2, 0], 0.75, 30.0),
        ([0, 0, 0, 1], 0.5, 40.0),  # above all bounds, so only the highest bound is known
    ],
)
def test_quantiles_lie_between_the_bounds_of_their_bucket(counts: list[int], share: float, expected: float) -> None:
    assert quantile(BOUNDS, counts, share) == expected


def test_rates_are_differences_over_time() -> None:
    samples = Samples()
    samples.add(100.0, {"x": cell(generated=1000, prompt=50, steps=7)})
    now = cell(generated=1030, prompt=50, steps=19)
    samples.add(102.0, {"x": now})
    sample = samples.kept[-1]
    assert (sample.generated_tokens_per_s, sample.prompt_tokens_per_s) == (15.0, 0.0)
    assert now.groups[0].steps_per_s == 6.0
    assert (sample.num_running, sample.num_waiting, sample.kv_usage) == (7, 3, 0.25)


def test_readings_that_follow_at_once_are_compared_with_one_a_second_before() -> None:
    samples = Samples()
    for time_s, generated in ((100.0, 0), (101.0, 10), (101.01, 11)):
        samples.add(time_s, {"x": cell(generated=generated)})
    assert samples.kept[-1].generated_tokens_per_s == pytest.approx(11 / 1.01)


def test_a_restarted_scheduler_counts_from_its_next_reading() -> None:
    samples = Samples()
    samples.add(100.0, {"x": cell(generated=1000)})
    samples.add(101.0, {"x": cell(epoch=2, generated=5)})
    samples.add(102.0, {"x": cell(epoch=2, generated=9)})
    assert [sample.generated_tokens_per_s for sample in samples.kept] == [0.0, 0.0, 4.0]


def test_cells_are_summed_except_those_that_do_not_respond() -> None:
    samples = Samples()
    samples.add(100.0, {"x": cell(), "y": cell()})
    samples.add(101.0, {"x": cell(generated=3), "y": cell(generated=4)})
    samples.add(102.0, {"x": cell(generated=5)})
    assert [sample.generated_tokens_per_s for sample in samples.kept] == [0.0, 7.0, 2.0]
    assert [sample.num_running for sample in samples.kept] == [14, 14, 7]


def test_latencies_are_of_the_last_ten_seconds_and_unset_without_any() -> None:
    samples = Samples()
    for second in range(13):
        samples.add(100.0 + second, {"x": cell(first=(4, 0, 0, 0) if second else (0, 0, 0, 0))})
    first_ones, last = list(samples.kept)[1:11], samples.kept[-1]
    assert all(sample.time_to_first_token_p50_ms == 5.0 for sample in first_ones)
    assert not last.HasField("time_to_first_token_p50_ms")
    assert not last.HasField("inter_token_p50_ms")


def test_a_reader_gets_new_entries_that_are_still_kept() -> None:
    samples = Samples()
    for second in range(HISTORY_S + 5):
        samples.add(float(second), {})
    assert len(samples.since(0)) == HISTORY_S
    assert [sample.time_unix_ms for sample in samples.since(HISTORY_S + 3)] == [
        1000 * (HISTORY_S + 3),
        1000 * (HISTORY_S + 4),
    ]
    assert samples.since(samples.last_number) == []
