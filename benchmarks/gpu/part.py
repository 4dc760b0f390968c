"""Run one part of the GPU benchmark: `python -m benchmarks.gpu.part NAME --seconds S --rows FILE --figures JSON`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import Report


def main() -> int:
    """Run the part and append each row to the file as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--figures", type=json.loads, default={})
    options = parser.parse_args()
    part, has_gpu = PARTS[options.name], torch.cuda.is_available()
    report = Report(options.seconds, figures=options.figures, file=options.rows)
    if not has_gpu:
        # Set here because Triton reads it when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
        if part.needs_gpu:
            report.note(options.name, "needs a GPU")
            return 0
    if options.name == "runner":
        report.note("Python, torch, GPU", _versions(has_gpu))
    module, _, function = part.function.partition(":")
    try:
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(report)
    except Exception as error:  # noqa: BLE001 (the rows before it count)
        traceback.print_exc()
        report.failed(options.name, f"{type(error).__name__}: {error}".splitlines()[0][:100])
    return 0


def _versions(has_gpu: bool) -> str:
    gpu = torch.cuda.get_device_name() if has_gpu else "no GPU, so nothing is measured"
    return f"{platform.python_version()}, {torch.__version__}, {gpu}"


if __name__ == "__main__":
    sys.exit(main())
