"""The figures of a run are computed from the output of the load generator and the CPU time of the threads."""

from __future__ import annotations

import pytest

from benchmarks.data_path import figures_of

_SEEN = {"seconds": 2.0, "requests": 10, "failed": 0, "tokens": 1000, "messages": 250, "cpu_s": 0.001}
_GAPS = {"gap_p50_ms": 1.0, "gap_p99_ms": 2.0}


def test_processor_time_is_counted_by_part_and_token() -> None:
    before = {"scheduler": 1.0, "detokenizer": 1.0, "router": 1.0, "worker main": 5.0, "worker link": 1.0}
    after = {"scheduler": 1.01, "detokenizer": 1.02, "router": 1.03, "worker main": 5.5, "worker link": 1.5}
    figures = figures_of({**_SEEN, **_GAPS}, before, after)
    assert figures["tokens_per_s"] == 500
    assert figures["requests_per_s"] == 5
    assert figures["tokens_per_message"] == 4
    assert figures["client_us"] == pytest.approx(1)
    assert figures["services_us"] == pytest.approx(60)
    assert figures["worker_us"] == pytest.approx(1000)
