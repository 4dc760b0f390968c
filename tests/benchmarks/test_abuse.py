"""The result of an abuse is judged by the probe's measurements."""

from __future__ import annotations

from collections import Counter

from benchmarks.abuse.__main__ import Result, cost, problems, quantile
from benchmarks.abuse.probe import Seen


def test_quantiles_are_observed_values() -> None:
    times = [float(number) for number in range(1, 101)]
    assert [quantile(times, part) for part in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([2.0], 0.99) == 2.0
    assert quantile([], 0.99) == float("inf")


def test_errors_and_a_p99_of_more_than_three_times_alone_are_problems() -> None:
    result = Result()
    for api, beside in (("gRPC", [0.3]), ("HTTP", [0.4])):
        result.alone[api] = Seen([0.1])
        result.beside[api] = Seen(beside)
    assert problems(result) == ["HTTP: p99 is 4.0 times the p99 without the abuse"]
    result.beside["gRPC"].errors.append("UNAVAILABLE")
    result.beside["HTTP"].times_s = []
    assert problems(result) == ["gRPC: UNAVAILABLE", "HTTP: p99 is inf times the p99 without the abuse"]


def test_an_abuse_may_delay_others_as_much_as_ordinary_requests_do() -> None:
    result = Result()
    result.alone["gRPC"], result.beside["gRPC"] = Seen([0.1]), Seen([0.4])
    result.ordinary_cpu_s["router"] = 1.0
    result.beside_ordinary["gRPC"] = Seen([0.35])
    assert problems(result) == ["gRPC: p99 is 4.0 times the p99 without the abuse"]
    result.beside_ordinary["gRPC"].times_s.append(0.45)
    assert problems(result) == []


def test_the_cost_of_a_request_is_the_cpu_time_of_each_component() -> None:
    assert cost(Counter(complete=3, refused=1), {"router": 0.2, "scheduler": 0.1}) == (
        "router 50.0, scheduler 25.0 ms per request"
    )
