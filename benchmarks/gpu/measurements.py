"""Measure the limits of the device, with which all other measurements are compared."""

from __future__ import annotations

import torch

import kernels
from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import copy_bandwidth, matmul_rate


def measure_ceilings(report: Report) -> None:
    """Measure the bytes per second of a copy, and the operations per second of a matrix product."""
    report.figures["bandwidth"], report.figures["matmul"] = copy_bandwidth(), matmul_rate()
    report.note("kernels", kernels.describe(torch.device("cuda")))
    report.note("copy bandwidth", f"{report.figures['bandwidth'] / 1e12:.2f} TB/s")
    report.note("matrix-product rate, bf16", f"{report.figures['matmul'] / 1e12:.0f} TFLOP/s")
