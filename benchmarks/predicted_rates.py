"""Predict the inner loop of the integer products on other processors: `python -m benchmarks.predicted_rates`.

It compiles kernels/csrc/dot_panel.cpp as the build does, extracts the loop of a full tile of rows over unpacked
weights, and lets llvm-mca (Debian package llvm) predict the cycles per iteration with all data in the L1 cache.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from rich.console import Console
from rich.table import Table

from kernels.build import FLAGS, ISA_FLAGS, SOURCES

# Processors of each build, as named by llvm-mca since LLVM 14.
PROCESSORS = {
    "avx512": ("icelake-server", "sapphirerapids", "znver4", "znver5"),
    "avxvnni": ("alderlake",),
    "avx2": ("skylake", "znver3"),
}
# Multiplications and additions per instruction on 16-bit values, for a 256-bit register.
_OPERATIONS = {"vpdpwssd": 32, "vpmaddwd": 32}


def inner_loop(isa: str) -> list[str]:
    """Return the instructions of the loop with the most multiply-adds."""
    source = str(SOURCES / "dot_panel.cpp")
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = ["g++", *flags, *ISA_FLAGS[isa], "-S", source, "-o", "-"]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^_ZN\S*sum_tile\S*HalfProducts\S*:$.*?\.cfi_endproc", assembly, re.MULTILINE | re.DOTALL)
    blocks = re.split(r"^\.L\w+:$", "\n".join(functions), flags=re.MULTILINE)
    best = max(blocks, key=_count_products)
    lines = [line.strip() for line in best.splitlines()]
    # The loop ends at the backward jump; labels, directives and comments are not instructions.
    end = next(i for i, line in enumerate(lines) if re.match(r"j[a-z]+\s", line))
    return [line for line in lines[:end] if line and (line[0].isalpha() or line.startswith("{vex}"))]


def _count_products(block: str) -> int:
    return sum(len(re.findall(rf"\b{name}\b", block)) for name in _OPERATIONS)


def cycles(loop: list[str], processor: str) -> float | None:
    """Return the cycles per iteration; None if llvm-mca has no model of the processor."""
    rounds = 100
    command = ["llvm-mca", f"-mcpu={processor}", f"-iterations={rounds}"]
    result = subprocess.run(command, input="\n".join(loop), capture_output=True, text=True, check=False)
    if "is not a recognized processor" in result.stderr or "unable to find" in result.stderr:
        return None
    found = re.search(r"Total Cycles:\s+(\d+)", result.stdout)
    return int(found[1]) / rounds if found else None


def main() -> None:
    """Print one row per build and processor."""
    if shutil.which("llvm-mca") is None:
        raise SystemExit("llvm-mca is not installed: apt-get install llvm")
    table = Table(title="int16 products, a full tile of rows")
    for column in ("build", "processor", "products", "cycles", "operations a cycle"):
        table.add_column(column, justify="left" if column in ("build", "processor") else "right")
    for isa, processors in PROCESSORS.items():
        loop = inner_loop(isa)
        count = _count_products("\n".join(loop))
        operations = count * 32 * (2 if isa == "avx512" else 1)
        for processor in processors:
            found = cycles(loop, processor)
            row = (
                ("unknown to this version of llvm-mca", "")
                if found is None
                else (f"{found:.0f}", f"{operations / found:.0f}")
            )
            table.add_row(isa, processor, str(count), *row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
