"""Predict with llvm-mca how fast other processors multiply Q4_1 weights by 16-bit inputs in integer arithmetic.

`python -m benchmarks.predicted_rates` disassembles the libraries of `python -m kernels.build`, extracts the loop over
blocks of 32 weights for each tile of rows, and prints its cycles, its multiply-adds per cycle and their share of the
peak, which is the rate of a loop of independent multiplies. It needs llvm-mca 19 (Debian package llvm-19) and objdump.

The prediction excludes the rounding of inputs, the unpacking of weights into tiles (for pairs, and with 256-bit
vectors), writing the output, cache misses, the code between loops, and the call. All loads are assumed to hit the L1
cache.

LLVM 19 has no model of Zen 5, and its model of Zen 4 contradicts measured rates in three places. Unless --unchanged is
given, instructions are therefore replaced by others:
- The model executes vpdpwssd and vpdpbusd in one unit, but measurements show two. They are replaced by vfmadd231ps,
  which the model executes in both units, with the same operands and latency.
- In the model, loading a number into all lanes of a vector occupies a shuffle unit, which would make the measured rate
  of pairs impossible. The instruction is replaced by a plain load.
- The model executes shifts by a constant in the units for multiplies, but only if the operand is in a register; shifts
  of an operand in memory, or by a variable number of bits, use two other units. If shifts used the units for
  multiplies, the measured times of 1 to 64 rows would not be proportional to the predicted ones. They are replaced by
  shifts by a variable number of bits.
- For znver5, LLVM uses the model of znver4, which has vector units of 256 bits; those of Zen 5 have 512 bits. Registers
  are therefore replaced by registers of half the width.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kernels.build import build

# Processors of each build. LLVM's model of sapphirerapids executes vpdpwssd in only one unit, although the processor
# has two, like icelake-server, which represents it here.
PROCESSORS = {
    "avx512": ("znver4", "znver5", "icelake-server"),
    "avxvnni": ("alderlake",),
    "avx2": ("znver3", "skylake"),
}
NUM_ROWS = (1, 2, 4, 8, 16, 64, 256)
LANES = {"avx512": 16, "avxvnni": 8, "avx2": 8}
_BLOCK = 32
_PANEL_VECTORS = 4
_ROUNDS = 100
_MULTIPLIES = ("vpdpwssd", "vpdpbusd", "vpmaddwd")
# With fewer rows, each processor's avx512 build multiplies in registers; see sum_dots.
_FEWEST_TILE_ROWS = {"znver4": 16, "znver5": 24, "icelake-server": 8}


class LoopError(Exception):
    """A loop was not found in the library; the message describes it."""


@dataclass(frozen=True)
class Structure:
    """A way to multiply a tile of rows: a function, and what an iteration of its loop over blocks computes."""

    name: str
    function: str  # its name, where ROWS stands for the number of rows
    vectors: int = _PANEL_VECTORS  # of channels
    multiplies: int = _BLOCK // 2  # per row and vector


_NIBBLES = "NibbleHalves<Q4Block>"
BYTES = Structure("bytes in registers", f"sum_split<NibbleBytes<Q4Block>, {_NIBBLES}, ROWS>")
REGISTERS = Structure("halves in registers", f"sum_registers<{_NIBBLES}, ROWS>")
PAIRS = Structure("pairs in a tile", "sum_tile<HalfProducts, ROWS, PairTile<HalfProducts> >", 2, _BLOCK // 4)
ONE_ROW = Structure("halves in registers", f"sum_direct<{_NIBBLES}, ROWS, 4>")
FEW_ROWS = Structure("halves in registers", f"sum_direct<{_NIBBLES}, ROWS, 2>")
TILE = Structure("halves in a tile", "sum_tile<HalfProducts, ROWS, DotTile<16, 1> >", 2)
PANEL_TILE = Structure("halves in a tile", "sum_panel_tile<HalfProducts, ROWS, 192>")


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop over blocks."""

    structure: Structure
    num_rows: int
    instructions: tuple[str, ...]

    @property
    def num_multiplies(self) -> int:
        """Return the number of multiply instructions."""
        return _count_multiplies(self.instructions)


def structures(isa: str, num_rows: int, processor: str) -> list[tuple[Structure, int]]:
    """Return the structures that multiply this number of rows, each with its number of rows; see sum_dots."""
    if isa == "avx512":
        if num_rows <= 2:
            return [(BYTES, num_rows)]
        many = PAIRS if processor.startswith("znver") else PANEL_TILE
        return _tiles(many if num_rows >= _FEWEST_TILE_ROWS[processor] else REGISTERS, num_rows, 6)
    if num_rows == 1:
        return [(BYTES if isa == "avxvnni" else ONE_ROW, 1)]
    return _tiles(FEW_ROWS if num_rows <= 4 else TILE, num_rows, 4)


def _tiles(structure: Structure, num_rows: int, size: int) -> list[tuple[Structure, int]]:
    return [(structure, min(size, num_rows - first)) for first in range(0, num_rows, size)]


def used_structures(isa: str) -> list[tuple[Structure, int]]:
    """Return all structures of a build, each with every number of rows that it can have."""
    counts, processors = range(1, 48), PROCESSORS[isa]
    found = {item for rows in counts for processor in processors for item in structures(isa, rows, processor)}
    return sorted(found, key=lambda item: (item[0].name, item[1]))


def functions(library: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the instructions of each function, with their addresses, by the function's name without namespaces."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    lines: list[tuple[int, str]] = []
    for line in text.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            name = re.sub(r"^void |midstream::|\(anonymous namespace\)::", "", header[1])
            # Function parameters are left out; template parameters contain no parentheses.
            lines = found.setdefault(name.partition("(")[0], [])
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+([^#<]*)", line):
            lines.append((int(instruction[1], 16), instruction[2].strip()))
    return found


def find_loop(code: dict[str, list[tuple[int, str]]], structure: Structure, num_rows: int) -> Loop:
    """Return the loop over blocks of a structure; raise LoopError if there is none with the expected multiplies."""
    name = structure.function.replace("ROWS", str(num_rows))
    if name not in code:
        raise LoopError(f"the library has no function {name}")
    expected = structure.multiplies * structure.vectors * num_rows
    loops = list(_loops(code[name]))
    counts = []
    for first, last in loops:
        body = [(address, text) for address, text in code[name] if first <= address < last and not _is_padding(text)]
        inner = [loop for loop in loops if first <= loop[0] and loop[1] < last]
        instructions = [text for _, text in body]
        if len(inner) == 1:
            # The compiler does not unroll the loop over the words of a block completely.
            [(start, end)] = inner
            repeated = [text for address, text in body if start <= address < end]
            times = expected // max(_count_multiplies(repeated), 1)
            before, after = (
                [text for address, text in body if is_part(address)] for is_part in (start.__gt__, end.__lt__)
            )
            instructions = before + repeated * times + after
        counts.append(_count_multiplies(instructions))
        if counts[-1] == expected and not any(text.startswith("j") for text in instructions):
            return Loop(structure, num_rows, tuple(instructions))
    raise LoopError(f"{name} has no loop of {expected} multiplies without branches; its loops have {counts}")


def _loops(lines: list[tuple[int, str]]) -> Iterable[tuple[int, int]]:
    """Return the addresses of the first instruction of each loop and of its jump back."""
    start = lines[0][0]
    for address, text in lines:
        jump = re.match(r"j\w+\s+([0-9a-f]+)$", text)
        if jump and start <= int(jump[1], 16) < address:
            yield int(jump[1], 16), address


def _is_padding(text: str) -> bool:
    return re.search(r"\bnop[wl]?\b|^xchg\s+%ax,%ax", text) is not None


def _count_multiplies(instructions: Iterable[str]) -> int:
    return sum(name in text.split() for text in instructions for name in _MULTIPLIES)


def replaced(instructions: Iterable[str], processor: str) -> list[str]:
    """Return the instructions, replacing those that LLVM's models of AMD's processors describe wrongly."""
    return [_replaced(text, processor) for text in instructions]


def _replaced(text: str, processor: str) -> str:
    if not processor.startswith("znver"):
        return text
    text = re.sub(r"^vp?broadcasts?[sd](?=.*\()", "vmovups", text)
    if processor == "znver3":
        return text
    text = re.sub(r"^vpdp\w+", "vfmadd231ps", text)
    text = re.sub(r"^(vps[rl]l)([wdq]) \$\w+,(%\wmm\d+),", r"\1v\2 \3,\3,", re.sub(r"\s+", " ", text))
    if processor == "znver5" and "%zmm" in text:
        text = text.replace("%ymm", "%xmm").replace("%zmm", "%ymm").replace("{1to16}", "{1to8}")
    return text


@functools.cache
def llvm_mca() -> str | None:
    """Return the path of llvm-mca, or of the newest llvm-mca-NN; None if there is none of version 19 or later."""
    names = ["llvm-mca", *(f"llvm-mca-{version}" for version in range(19, 40))]
    found: list[tuple[int, str]] = []
    for path in filter(None, map(shutil.which, names)):
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        version = re.search(r"version (\d+)", text)
        if version and int(version[1]) >= 19:
            found.append((int(version[1]), path))
    return max(found)[1] if found else None


@dataclass(frozen=True)
class Prediction:
    """The number of cycles of an iteration, and for how many of them each unit is busy."""

    cycles: float
    units: dict[str, float]

    @property
    def busiest(self) -> str:
        """Return the busiest units of the processor with their cycles."""
        names = sorted(self.units, key=lambda name: -self.units[name])[:2]
        return ", ".join(f"{name} {self.units[name]:.0f}" for name in names)


def predict(instructions: Iterable[str], processor: str) -> Prediction:
    """Return the prediction of llvm-mca for a loop of these instructions."""
    path = llvm_mca()
    if path is None:
        raise SystemExit("llvm-mca 19 or later is not installed: apt-get install llvm-19")
    views = ["-all-views=false", "-summary-view", "-resource-pressure"]
    command = [path, f"-mcpu={processor}", f"-iterations={_ROUNDS}", *views]
    result = subprocess.run(command, input="\n".join(instructions), capture_output=True, text=True, check=False)
    total = re.search(r"Total Cycles:\s+(\d+)", result.stdout)
    if total is None:
        raise SystemExit(f"llvm-mca failed for {processor}: {result.stderr.strip()[:2000]}")
    if processor == "znver5" and "- Zn4" not in result.stdout:
        raise SystemExit(f"{path} has its own model of znver5; replaced() assumes that LLVM uses that of znver4")
    names = re.findall(r"^\[[\d.]+\]\s+- (?:Zn\d|[A-Z]+(?=Port))?(\w+)$", result.stdout, re.MULTILINE)
    pressure = re.search(r"Resource pressure per iteration:\n.*\n(.*)", result.stdout)
    cells = pressure[1].split() if pressure else []
    units: dict[str, float] = {}
    for name, cell in zip(names, cells, strict=True):
        units[name] = max(units.get(name, 0.0), 0.0 if cell == "-" else float(cell))
    return Prediction(int(total[1]) / _ROUNDS, units)


def peak(isa: str, processor: str, *, unchanged: bool) -> float:
    """Return the multiply-adds per cycle of independent multiplies, each followed by an add with AVX2."""
    if isa == "avx512":
        loop = [f"vpdpwssd %zmm31, %zmm30, %zmm{i}" for i in range(24)]
    elif isa == "avxvnni":
        loop = [f"{{vex}} vpdpwssd %ymm15, %ymm14, %ymm{i}" for i in range(12)]
    else:
        loop = [f"vpmaddwd %ymm15, %ymm14, %ymm{i}\nvpaddd %ymm{i}, %ymm{i + 6}, %ymm{i + 6}" for i in range(6)]
    num_multiplies = len(loop)
    lines = "\n".join(loop).splitlines()
    prediction = predict(lines if unchanged else replaced(lines, processor), processor)
    return num_multiplies * 2 * LANES[isa] / prediction.cycles


def main() -> None:
    """Print the loops of each build and processor, then the shares of the peak for numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=tuple(PROCESSORS), nargs="+", default=tuple(PROCESSORS))
    parser.add_argument("--unchanged", action="store_true", help="Do not replace instructions.")
    arguments = parser.parse_args()
    shares = Table(title="Predicted share of the peak by number of rows")
    for column in ("build", "processor", *map(str, NUM_ROWS)):
        shares.add_column(column, justify="left" if column in ("build", "processor") else "right")
    console = Console(width=110)
    for isa in arguments.isa:
        code = functions(build(isa))
        loops = [find_loop(code, *item) for item in used_structures(isa)]
        for processor in PROCESSORS[isa]:
            highest = peak(isa, processor, unchanged=arguments.unchanged)
            table = Table(title=f"{isa}, {processor}: peak {highest:.0f} multiply-adds per cycle")
            columns = (
                "loop",
                "rows",
                "multiplies",
                "cycles",
                "multiply-adds a cycle",
                "share",
                "busiest units, cycles",
            )
            for column in columns:
                table.add_column(column, justify="left" if column == "loop" else "right")
            cycles: dict[tuple[Structure, int], float] = {}
            for loop in loops:
                lines = loop.instructions if arguments.unchanged else replaced(loop.instructions, processor)
                prediction = predict(lines, processor)
                cycles[loop.structure, loop.num_rows] = prediction.cycles * _PANEL_VECTORS / loop.structure.vectors
                work = loop.num_rows * loop.structure.vectors * LANES[isa] * _BLOCK / prediction.cycles
                table.add_row(
                    loop.structure.name, str(loop.num_rows), str(loop.num_multiplies), f"{prediction.cycles:.0f}",
                    f"{work:.1f}", f"{work / highest:.2f}", prediction.busiest,
                )  # fmt: skip
            console.print(table)
            cells = []
            for num_rows in NUM_ROWS:
                used = structures(isa, num_rows, processor)
                work = num_rows * _PANEL_VECTORS * LANES[isa] * _BLOCK
                cells.append(f"{work / sum(cycles[item] for item in used) / highest:.2f}")
            shares.add_row(isa, processor, *cells)
    console.print(shares)


if __name__ == "__main__":
    main()
