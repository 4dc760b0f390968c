"""A service's garbage collector runs a full collection only when the process has grown."""

from __future__ import annotations

import subprocess
import sys

# After each phase, in which the process grows by 100,000 objects or none, prints the number of full collections so far.
_SCRIPT = """
import gc
from midstream.service import tune_collector

num_full = 0

def count(phase, info):
    global num_full
    num_full += phase == "stop" and info["generation"] == 2

gc.callbacks.append(count)
tune_collector(min_growth=250_000)
kept = []
for growth in [100_000] * 4 + [0] * 4 + [100_000] * 12:
    kept += [[] for _ in range(growth)]
    for _ in range(20):
        [[] for _ in range(10_000)]  # young objects that are freed at once
    print(num_full)
"""


def test_a_full_collection_runs_only_when_the_process_has_grown() -> None:
    result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    counts = [int(line) for line in result.stdout.split()]
    assert counts[:2] == [0, 0]
    assert counts[3:8] == [1] * 5
    # The remaining 1,200,000 objects cause a collection for every 250,000 objects and, once there are 1,000,000, for
    # every growth by a quarter.
    assert 4 <= counts[-1] <= 6
