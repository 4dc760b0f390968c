"""All that can be checked and measured on a GPU, in one command: `python -m benchmarks.gpu [--seconds N]`.

Needs torch, Triton and transformers alone, and nothing from a network. Checks every kernel against float64, measures
the ceilings of the device, and compares the kernels, an 8B-shaped model with random weights and transformers' own
continuous batching with their limits. Without a CUDA device it checks the kernels in Triton's interpreter at tiny
sizes, and says that no GPU was measured. Exits with 1 if a limit was missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import traceback
from collections.abc import Callable

import torch

from benchmarks.gpu.report import Report

BUDGET_S = 450.0
# Shortest time in which each part makes sense.
LEAST_S = 30.0


def main() -> int:
    """Run everything, print the table, and say whether all limits held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Checks and measures the GPU parts.")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="no part is started after this time")
    report = Report(parser.parse_args().seconds)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        # Read when Triton is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    report.note("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    try:
        import triton
    except ImportError:
        report.failed("Triton", "not installed")
    else:
        report.note("Triton", triton.__version__)
        _run(report, has_gpu)
    print(f"\n{report.table()}\n")
    if not has_gpu:
        print("No GPU was measured: this machine has none. The checks above ran in Triton's interpreter on the CPU.")
    print(f"{report.num_missed} of {len(report.rows)} rows missed their limit.")
    return 1 if report.num_missed else 0


def _run(report: Report, has_gpu: bool) -> None:
    from benchmarks.gpu.checks import run_checks

    device = torch.device("cuda" if has_gpu else "cpu")
    parts: dict[str, Callable[[], None]] = {"checks": lambda: run_checks(report, device)}
    if has_gpu:
        from benchmarks.gpu.measurements import measurements

        report.note("device", torch.cuda.get_device_name())
        parts |= measurements(report)
    for name, part in parts.items():
        if report.seconds_left < LEAST_S:
            report.failed(name, "no time left")
            continue
        try:
            part()
        except Exception as error:  # noqa: BLE001 (one part's failure must not hide the others' numbers)
            traceback.print_exc()
            report.failed(name, f"{type(error).__name__}: {error}".splitlines()[0][:100])
        if has_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
