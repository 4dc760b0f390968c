"""Results of several sessions are merged, and CPU time includes that of all descendants."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.peer import Figures
from benchmarks.peers.results import merged, read_results, write_results
from benchmarks.peers.rounds import Measurement

FIRST = Measurement(0, "a", 0.5, Figures("mixed", 10.0, 2.0, (1.0, 2.0), (3.0, 4.0), 3.5))
SECOND = Measurement(1, "a", 0.5, Figures("mixed", 11.0, 2.0))
AGAIN = replace(FIRST, figures=Figures("mixed", 12.0, 2.0))

# Each of these processes uses 0.3 s of CPU time: a child that has ended, a child that is still running, and a
# grandchild whose parent has exited.
PROGRAM = """
import subprocess, sys
from benchmarks.peers.processor_time import mark_processes, processor_seconds
mark_processes()
SPIN = "import time\\nwhile time.process_time() < 0.3: pass\\nprint('spun', flush=True)\\n"
subprocess.run([sys.executable, "-c", SPIN], check=True, stdout=subprocess.DEVNULL)
running = subprocess.Popen([sys.executable, "-c", SPIN + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
detach = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
left = subprocess.Popen(
    [sys.executable, "-c", detach, SPIN + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
for process in (running, left):
    assert process.stdout.readline() == b"spun\\n"
left.wait()
print(processor_seconds())
for process in (running, left):
    process.stdin.close()
"""


def test_new_measurements_replace_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_results(path) == []
    write_results(merged([FIRST, SECOND], [AGAIN]), path)
    assert read_results(path) == [AGAIN, SECOND]


def test_measurements_survive_json(tmp_path: Path) -> None:
    write_results([FIRST], tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == [FIRST]


def test_processor_time_includes_all_started_processes() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) >= 0.85
