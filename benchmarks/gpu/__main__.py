"""Check and measure everything on a GPU: `python -m benchmarks.gpu [--parts NAME,...] [--budget-s S]`.

Needs only torch, Triton and transformers, and no network. Each part is a separate process with a time limit, so that an
illegal access or a hang affects nothing else: the basic checks run first, then the measurements in order of importance,
then the exhaustive checks. Each row is printed as soon as it is known; at the time limit, or on SIGTERM or SIGINT, the
table is printed with the rows known so far. Without a CUDA device, the parts run at tiny sizes with the kernels in
Triton's interpreter, and nothing is measured. The exit status is 1 if a limit was missed or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.report import Report, Row

BUDGET_S = 540.0
# With less time, a part could only import torch and create weights.
_LEAST_S = 15.0
# Time reserved for printing the table.
_RESERVE_S = 3.0


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print the table; return 0 if all limits were met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check and measure the GPU parts.")
    parser.add_argument("--parts", default="", help=f"comma-separated parts, from {', '.join(PARTS)}; all if empty")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="time limit of the whole run in seconds")
    options = parser.parse_args(arguments)
    names = [name for name in options.parts.split(",") if name] or list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"unknown part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    report = Report(options.budget_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        for name in names:
            run_part(report, name, PARTS[name])
    except KeyboardInterrupt:
        report.failed("the rest", "interrupted")
    print(f"\n{report.table()}\n")
    print(f"{report.num_missed} of {len(report.rows)} rows missed their limit.")
    return 1 if report.num_missed else 0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def run_part(report: Report, name: str, part: Part) -> None:
    """Run a part in its own process group within its time limit, and collect its rows."""
    limit_s = min(part.limit_s, report.seconds_left - _RESERVE_S)
    if limit_s < min(_LEAST_S, part.limit_s):
        report.failed(name, "no time left")
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.part",
            name,
            "--seconds",
            f"{limit_s:.0f}",
            "--rows",
            str(rows),
        ]
        command += ["--figures", json.dumps(report.figures)]
        process = subprocess.Popen(command, start_new_session=True)
        reason = ""
        try:
            code = process.wait(limit_s)
            if code:
                reason = f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        except subprocess.TimeoutExpired:
            reason = f"ran past {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _take(report, rows)
    if reason:
        report.failed(name, reason)


def _take(report: Report, rows: Path) -> None:
    for line in rows.read_text().splitlines():
        entry = json.loads(line)
        report.figures |= entry.pop("figures")
        report.rows.append(Row(**entry))


if __name__ == "__main__":
    sys.exit(main())
