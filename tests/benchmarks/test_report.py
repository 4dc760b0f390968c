"""The report that compares two or more systems."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report
from benchmarks.peers.comparisons import Comparison, Ratio
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.peer import Figures
from benchmarks.peers.rounds import Measurement

LABELS = {"midstream": "Midstream", "vllm": "vLLM"}
MEASURED = [
    Measurement(0, "midstream", 0.05, Figures("mixed", 1500.0, 5.0, (10.0, 20.0), (1.0, 2.0))),
    Measurement(1, "midstream", 0.05, Figures("mixed", 1600.0, 5.0, (12.0, 24.0), (1.5, 2.5))),
    Measurement(2, "midstream", 0.05, Figures("mixed", 1400.0, 5.0, (11.0, 90.0), (1.2, 2.2))),
    Measurement(0, "vllm", 0.05, Figures("mixed", 1000.0, 8.0)),
]
RATIO = Ratio(Comparison("mixed", "midstream", ("vllm",), 1.3, 1.6), "vllm", 1.45, 1.5, 1.4, 1.6, 3, 1.25)


def test_results_are_best_and_median_and_empty_if_not_measured() -> None:
    _, ours, peers = report.figures_table(LABELS, MEASURED)
    assert ours == ["Midstream", "", "1,600 / 1,500", "", "", ""]
    assert peers == ["vLLM", "", "1,000 / 1,000", "", "", ""]


def test_latencies_are_medians_of_each_percentile() -> None:
    assert report.latencies_table(LABELS, MEASURED)[1:] == [["Midstream", "mixed", "11.0 / 24.0", "1.2 / 2.2"]]


def test_a_ratio_shows_its_spread_and_whether_it_is_enough() -> None:
    row = ["mixed", "Midstream", "vLLM", "1.45", "1.50 (1.40 to 1.60)", "1.25", "1.3", "1.6", "yes"]
    assert report.ratios_table(LABELS, [RATIO])[1] == row


def test_tables_as_markdown_and_text() -> None:
    rows = [["a", "b"], ["long", "1"]]
    assert report.as_markdown(rows) == "| a | b |\n| --- | --- |\n| long | 1 |"
    assert report.as_text(rows) == "a     b\nlong  1"


def test_only_text_between_the_markers_changes() -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    expected = f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    assert report.between_markers(page, "new") == expected
    assert report.between_markers(expected, "new") == expected


def test_a_page_without_markers_gets_them_at_its_end() -> None:
    assert report.between_markers("a page\n", "new") == f"a page\n\n{report.BEGIN}\n\nnew\n\n{report.END}\n"


def test_the_page_names_peers_that_did_not_run_and_shows_a_plot(tmp_path: Path) -> None:
    report.write(tmp_path, LABELS, MEASURED, [RATIO], {"vllm": "ended by SIGILL"})
    page = (tmp_path / report.PAGE).read_text(encoding="utf-8")
    assert "- vLLM: ended by SIGILL" in page
    assert "3 rounds; in each" in page
    assert "Provisional" not in page
    assert (tmp_path / report.PLOT).read_text(encoding="utf-8").startswith("<?xml")


def test_results_from_a_busy_machine_are_provisional() -> None:
    busy = [Measurement(0, "midstream", 0.25, MEASURED[0].figures)]
    assert "**Provisional:** other programs kept up to 0.2 cores busy" in report.section(LABELS, busy, [], {})


def test_the_machine_is_named_by_the_features_that_select_kernels(tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("model name : Some CPU\nflags : fpu avx2 avx512f avx512_bf16\n\nmodel name : Some CPU\n")
    assert "cores of Some CPU (avx2, avx512f, avx512-bf16)" in describe_machine(cpu_info)
