"""Write the results of the comparison with peers: tables as text and Markdown, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from .peers.comparisons import Ratio, median_figure
from .peers.machine import describe_machine
from .peers.peer import ALL_WORKLOADS
from .peers.rounds import Measurement

PAGE, PLOT = "benchmarks.md", "images/benchmarks-peers.svg"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
# Above this load, other programs used the processor, and the figures are unreliable.
BUSY_CORES = 0.2

_HEADER = f"""# Benchmarks

Results of the last run of `make bench-peers`, which writes everything between the two markers.

{BEGIN}
{END}
"""


def figures_table(labels: Mapping[str, str], measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a table of the best and median throughput by peer and workload, with a header row."""
    rows = [["tokens/s, best / median (prefill: prompt tokens)", *ALL_WORKLOADS]]
    for peer, label in labels.items():
        cells = [_best_and_median(measurements, peer, workload) for workload in ALL_WORKLOADS]
        if any(cells):
            rows.append([label, *cells])
    return rows


def _best_and_median(measurements: Sequence[Measurement], peer: str, workload: str) -> str:
    speeds = [it.figures.tokens_per_s for it in measurements if it.peer == peer and it.figures.workload == workload]
    return f"{max(speeds):,.0f} / {statistics.median(speeds):,.0f}" if speeds else ""


def latencies_table(labels: Mapping[str, str], measurements: Sequence[Measurement]) -> list[list[str]]:
    """Return a table of the latencies of streaming peers in milliseconds, as medians of p50 / p99."""
    rows = [["ms, p50 / p99", "workload", "time to first token", "between tokens"]]
    for peer, label in labels.items():
        for workload in ALL_WORKLOADS:
            some = [it.figures for it in measurements if it.peer == peer and it.figures.workload == workload]
            first = [it.ttft_ms for it in some if it.ttft_ms]
            between = [it.inter_token_ms for it in some if it.inter_token_ms]
            if first and between:
                rows.append([label, workload, _pair_text(first), _pair_text(between)])
    return rows


def ratios_table(labels: Mapping[str, str], ratios: Sequence[Ratio]) -> list[list[str]]:
    """Return a table of the ratios ours / peer with their spread over the rounds; the first row is the header."""
    rows = [
        [
            "workload",
            "ours",
            "against",
            "best / best",
            "median of rounds (lowest to highest)",
            "in CPU time",
            "at least",
            "aim",
            "reached",
        ]
    ]
    for it in ratios:
        comparison = it.comparison
        what = f"{comparison.workload}, p99 between tokens" if comparison.is_gap else comparison.workload
        spread = f"{it.median:.2f} ({it.lowest:.2f} to {it.highest:.2f})"
        reached = "aim" if it.best >= comparison.aim else "yes" if it.best >= comparison.at_least else "no"
        ours, peer = labels.get(comparison.ours, comparison.ours), labels.get(it.peer, it.peer)
        cost = "" if it.in_processor_time is None else f"{it.in_processor_time:.2f}"
        rows.append(
            [
                what,
                ours,
                peer,
                f"{it.best:.2f}",
                spread,
                cost,
                f"{comparison.at_least:g}",
                f"{comparison.aim:g}",
                reached,
            ]
        )
    return rows


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def write(
    docs: Path,
    labels: Mapping[str, str],
    measurements: Sequence[Measurement],
    ratios: Sequence[Ratio],
    failed: Mapping[str, str],
) -> None:
    """Write the tables and the plot into `docs`; text outside the markers is kept."""
    page = docs / PAGE
    text = page.read_text(encoding="utf-8") if page.exists() else _HEADER
    page.write_text(between_markers(text, section(labels, measurements, ratios, failed)), encoding="utf-8")
    (docs / PLOT).parent.mkdir(exist_ok=True)
    plot(docs / PLOT, labels, measurements)


def section(
    labels: Mapping[str, str], measurements: Sequence[Measurement], ratios: Sequence[Ratio], failed: Mapping[str, str]
) -> str:
    """Return the Markdown between the markers."""
    num_rounds = len({it.round for it in measurements})
    load = max((it.load for it in measurements), default=0.0)
    parts = [
        f"{describe_machine()}. {num_rounds} rounds; in each, peers ran every workload in turn, on the same tokens.",
    ]
    if load > BUSY_CORES:
        parts.append(
            f"**Provisional:** other programs kept up to {load:.1f} cores busy (seen before each run), so only large "
            "differences are meaningful."
        )
    parts += [as_markdown(figures_table(labels, measurements)), f"![Throughput by peer]({PLOT})"]
    if ratios:
        parts.append(
            "The ratio of our throughput to the peer's; higher is better for us. The ratio of the best rounds is used, "
            "since other work on a machine only makes runs slower; the ratios within each round show the spread. For "
            "CPU time, the ratio is that of the peer to ours, over all processes; that of llama.cpp includes loading."
        )
        parts.append(as_markdown(ratios_table(labels, ratios)))
    latencies = latencies_table(labels, measurements)
    if len(latencies) > 1:
        parts.append(as_markdown(latencies))
    if failed:
        parts.append("Did not run here, or not to the end:")
        parts.append("\n".join(f"- {labels.get(name, name)}: {reason}" for name, reason in failed.items()))
    return "\n\n".join(parts)


def between_markers(text: str, content: str) -> str:
    """Return `text` with `content` between the markers, which are appended if missing."""
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def plot(path: Path, labels: Mapping[str, str], measurements: Sequence[Measurement]) -> None:
    """Draw one panel per workload with one bar per peer; a line spans the lowest to the highest round.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (extra `plots`).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "midstream"  # makes the file reproducible
    from matplotlib import pyplot as plt

    workloads = [name for name in ALL_WORKLOADS if any(it.figures.workload == name for it in measurements)]
    figure, axes = plt.subplots(
        1,
        len(workloads),
        figsize=(3.2 * len(workloads) + 2.6, 0.4 * len(labels) + 1.2),
        layout="constrained",
        squeeze=False,
    )
    names = [name for name in reversed(list(labels)) if any(it.peer == name for it in measurements)]
    for axis, workload in zip(axes[0], workloads, strict=True):
        for position, peer in enumerate(names):
            values = [
                it.figures.tokens_per_s for it in measurements if it.peer == peer and it.figures.workload == workload
            ]
            median = median_figure(measurements, peer, workload)
            if median is not None:
                axis.barh(position, median, color="tab:blue" if peer.startswith("midstream") else "tab:gray")
                axis.plot([min(values), max(values)], [position, position], color="black", linewidth=1)
        axis.set_title(workload)
        axis.set_yticks(
            range(len(names)), [labels[name] for name in names] if axis is axes[0][0] else [""] * len(names)
        )
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("tokens per second")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _pair_text(pairs: Sequence[tuple[float, float]]) -> str:
    middle = len(pairs) // 2
    p50, p99 = sorted(it[0] for it in pairs)[middle], sorted(it[1] for it in pairs)[middle]
    return f"{p50:,.1f} / {p99:,.1f}"
