"""Metrics of a run: throughput, time to first token, and inter-token time, as a table, JSON or plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from midstream.cli.bench.measure import RequestTimes, RunResult
from midstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one run. Times are in milliseconds.

    Attributes:
        tokens_per_s: Output tokens (or prompt tokens, for prefill) per second of the run.
        ttft_ms: Time to first token at p50 and p99.
        inter_token_ms: Gap between tokens of one stream at p50 and p99; tokens of one chunk share its gap evenly.
        failure: Reason of the first failed request; empty if none failed.
    """

    workload: str
    tokens_per_s: float
    duration_s: float
    num_requests: int
    num_failed: int
    ttft_ms: tuple[float, float]
    inter_token_ms: tuple[float, float]
    latency_ms: tuple[float, float]
    failure: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the `share`-quantile (0..1) of the values by the nearest-rank method; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(result: RunResult) -> Summary:
    finished = [times for times in result.requests if not times.error]
    counted = sum(times.num_prompt_tokens if result.counts_input else times.num_tokens for times in finished)
    first = [(times.arrivals[0][0] - times.started) * 1e3 for times in finished if times.arrivals]
    last = [(times.arrivals[-1][0] - times.started) * 1e3 for times in finished if times.arrivals]
    gaps = [gap for times in finished for gap in inter_token_gaps_ms(times)]
    return Summary(
        workload=result.workload,
        tokens_per_s=counted / result.duration_s,
        duration_s=result.duration_s,
        num_requests=len(result.requests),
        num_failed=len(result.requests) - len(finished),
        ttft_ms=(percentile(first, 0.5), percentile(first, 0.99)),
        inter_token_ms=(percentile(gaps, 0.5), percentile(gaps, 0.99)),
        latency_ms=(percentile(last, 0.5), percentile(last, 0.99)),
        failure=next((times.error for times in result.requests if times.error), ""),
    )


def inter_token_gaps_ms(times: RequestTimes) -> list[float]:
    """Return the gap before each token after the first chunk; a chunk of n tokens counts as n equal gaps."""
    gaps: list[float] = []
    for (before, _), (now, count) in zip(times.arrivals, times.arrivals[1:], strict=False):
        gaps.extend([(now - before) * 1e3 / count] * count)
    return gaps


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Return a table with one row per run."""
    table = Table(title="midstream bench", title_justify="left")
    for column in ("workload", "tok/s", "seconds", "requests", "failed", "TTFT p50/p99 ms", "inter-token p50/p99 ms"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in summaries:
        table.add_row(
            row.workload,
            f"{row.tokens_per_s:,.0f}",
            f"{row.duration_s:.1f}",
            str(row.num_requests),
            str(row.num_failed),
            f"{row.ttft_ms[0]:.0f} / {row.ttft_ms[1]:.0f}",
            f"{row.inter_token_ms[0]:.1f} / {row.inter_token_ms[1]:.1f}",
        )
    return table


def print_failures(summaries: Sequence[Summary], console: Console) -> None:
    """Print the reasons for which requests failed, each only once."""
    for failure in dict.fromkeys(row.failure for row in summaries if row.failure):
        console.print(f"Requests failed: {failure}", style="red", markup=False, soft_wrap=True)


def write_json(summaries: Sequence[Summary], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in summaries], indent=2) + "\n", encoding="utf-8")


def check_files(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ConfigError if results could not be written to these files, before anything is measured."""
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path.parent} is not a folder", field=flag)
    if plot_path is not None and plot_path.suffix not in (".png", ".svg"):
        raise ConfigError(f"{plot_path} must end with .png or .svg", field="--plot")
    if plot_path is not None and find_spec("matplotlib") is None:
        raise ConfigError("needs `pip install midstream[plots]`", field="--plot")


def plot(results: Sequence[RunResult], path: Path) -> None:
    """Plot the number of received tokens over time for each run, as PNG or SVG according to the file extension."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for result in results:
        points = sorted(arrival for times in result.requests for arrival in times.arrivals)
        total, xs, ys = 0, [0.0], [0]
        for moment, count in points:
            total += count
            xs.append(moment)
            ys.append(total)
        axes.plot(xs, ys, label=result.workload)
    axes.set_xlabel("seconds")
    axes.set_ylabel("output tokens received")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
