"""Which of our figures are compared with those of which peers, and the required ratios.

The ratio of the best rounds is used, since other work on the machine can only slow runs down. The ratios within each
round, measured seconds apart with the same tokens, show how reliable it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .peer import Figures
from .rounds import Measurement


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table of ratios.

    Attributes:
        peers: Names of the peers; the one with the best round is used.
        at_least: Required ratio.
        is_gap: Whether to compare the 99th percentile of the time between tokens (the peer's over ours) instead of
            throughput.
    """

    workload: str
    ours: str
    peers: tuple[str, ...]
    at_least: float
    aim: float
    is_gap: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """The result of a comparison; above 1 means that we are better.

    Attributes:
        peer: The best of the peers.
        best: Our best round over the peer's best.
        median: Median of the ratios within each round, like lowest and highest.
        in_processor_time: Median of the peer's CPU time over ours, which other work hardly affects; None if one is
            unknown.
    """

    comparison: Comparison
    peer: str
    best: float
    median: float
    lowest: float
    highest: float
    num_rounds: int
    in_processor_time: float | None = None


_IN_PROCESS = ("llamacpp", "openvino-fp16", "openvino-int8", "openvino-int4", "vllm-bfloat16", "vllm-float32")
_OPENVINO, _VLLM, _VLLM_SERVER = _IN_PROCESS[1:4], _IN_PROCESS[4:], ("vllm-server-bfloat16", "vllm-server-float32")

COMPARISONS = (
    Comparison("single", "midstream", ("llamacpp",), 1.25, 1.4),
    Comparison("single", "midstream-bf16", ("openvino-fp16",), 1.0, 1.1),
    Comparison("mixed", "midstream", (*_IN_PROCESS, *_VLLM_SERVER), 1.25, 1.6),
    Comparison("prefix", "midstream", (*_VLLM, *_VLLM_SERVER), 1.25, 1.5),
    Comparison("prefix", "midstream", _OPENVINO, 1.25, 1.5),
    Comparison("prefill", "midstream", (*_IN_PROCESS, *_VLLM_SERVER), 1.1, 1.25),
    Comparison("prefill", "midstream-bf16", ("openvino-fp16",), 1.0, 1.1),
    Comparison("chat", "midstream", (*_IN_PROCESS, *_VLLM_SERVER), 1.25, 1.6),
    Comparison("chat", "midstream", _VLLM_SERVER, 4.0, 6.0, is_gap=True),
    Comparison("mixed", "midstream-int8", ("openvino-int8",), 1.25, 1.6),
    Comparison("prefill", "midstream-int8", ("openvino-int8",), 1.1, 1.25),
    Comparison("chat", "midstream-int8", ("openvino-int8",), 1.25, 1.6),
    Comparison("single", "midstream", ("midstream-engine",), 0.9, 0.95),
    Comparison("mixed", "midstream", ("midstream-engine",), 0.98, 1.0),
)


def median_figure(measurements: Sequence[Measurement], peer: str, workload: str) -> float | None:
    """Return the median throughput of a peer; None if it was not measured."""
    values = by_round(measurements, peer, workload, _tokens_per_s)
    return statistics.median(values.values()) if values else None


def ratio_of(comparison: Comparison, measurements: Sequence[Measurement]) -> Ratio | None:
    """Return the result of `comparison`; None if either side was not measured."""
    value = _gap_rate if comparison.is_gap else _tokens_per_s
    rivals = {peer: by_round(measurements, peer, comparison.workload, value) for peer in comparison.peers}
    best = max((peer for peer in rivals if rivals[peer]), key=lambda it: max(rivals[it].values()), default="")
    ratios = _ratios(measurements, comparison, best, value)
    if not ratios:
        return None
    costs = _ratios(measurements, comparison, best, _processor_rate)
    in_processor_time = statistics.median(costs) if costs and not comparison.is_gap else None
    ours = by_round(measurements, comparison.ours, comparison.workload, value)
    of_best = max(ours.values()) / max(rivals[best].values())
    return Ratio(
        comparison, best, of_best, statistics.median(ratios), min(ratios), max(ratios), len(ratios), in_processor_time
    )


def _ratios(
    measurements: Sequence[Measurement], comparison: Comparison, peer: str, value: Callable[[Figures], float | None]
) -> list[float]:
    """Return our figure divided by the peer's, for each round that has both."""
    ours = by_round(measurements, comparison.ours, comparison.workload, value)
    theirs = by_round(measurements, peer, comparison.workload, value)
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def by_round(
    measurements: Sequence[Measurement], peer: str, workload: str, value: Callable[[Figures], float | None]
) -> dict[int, float]:
    """Return a figure of one peer and workload for each round that has it."""
    values = {it.round: value(it.figures) for it in measurements if it.peer == peer and it.figures.workload == workload}
    return {number: figure for number, figure in values.items() if figure is not None}


def _tokens_per_s(figures: Figures) -> float:
    return figures.tokens_per_s


def _gap_rate(figures: Figures) -> float | None:
    """Return the inverse of the 99th percentile of the time between tokens, so that higher is better."""
    return 1.0 / figures.inter_token_ms[1] if figures.inter_token_ms else None


def _processor_rate(figures: Figures) -> float | None:
    """Return the token rate per CPU second; all runs of a round have the same number of tokens."""
    return 1.0 / figures.processor_s if figures.processor_s else None
