"""Report a worker's environment on this machine as JSON: `python -m gpu_worker.machine [--limits]`.

`midstream doctor` and `midstream bench --quick` run this in a separate process, because they do not import torch
themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable

import torch

from kernels.cpu import load_library
from midstream.processors import num_compute_threads

# A buffer larger than any last-level cache, and the matrix size of a layer in a mid-sized model.
_NUM_BYTES = 512 << 20
_GEMM_SIZE = 1024
_MEASURE_S = 0.5


def describe() -> dict[str, object]:
    """Return versions, GPUs and the CPU kernels; if no build of the kernels is usable, `kernels` is empty and `reasons`
    is not.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = load_library(os.environ.get("MIDSTREAM_CPU_ISA", "auto"))  # the setting, as a worker reads it
    is_cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if is_cuda else [],
        "threads": num_compute_threads(),
        "kernels": library.isa if library is not None else "",
        "reasons": [str(warning.message) for warning in caught],
    }


def measure_limits() -> dict[str, float]:
    """Return this machine's peak memory read bandwidth (bytes/s) and float32 matrix product throughput (FLOP/s)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(num_compute_threads())
    data = torch.ones(_NUM_BYTES // 4, device=device)
    left, right = (torch.rand(_GEMM_SIZE, _GEMM_SIZE, device=device) for _ in range(2))
    return {
        "read_bytes_per_s": _NUM_BYTES / _best_s(data.sum),
        "flops_per_s": 2 * _GEMM_SIZE**3 / _best_s(lambda: left @ right),
    }


def _best_s(work: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Print the description as one JSON object."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--limits",
        action="store_true",
        help="Also measure the rates of memory access and matrix multiplication (takes one second).",
    )
    arguments = parser.parse_args()
    print(json.dumps(describe() | (measure_limits() if arguments.limits else {})))


if __name__ == "__main__":
    main()
