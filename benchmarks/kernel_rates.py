"""Measure how fast one thread multiplies packed weights: `python -m benchmarks.kernel_rates`.

Each result is the rate of the fastest of many runs of less than a millisecond, so other work on the machine has little
effect. A run includes the rounding of the input, but neither checks in Python nor the allocation of the output; a step
of the engine does both once for all layers.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from kernels.cpu import InputFormat, Library, PackedLinear, ThreadPool, WeightFormat, load_library
from kernels.cpu.blocks import random_blocks

NUM_ROWS = (1, 2, 4, 8, 16, 64, 256)


def rate(linear: PackedLinear, threads: ThreadPool, num_rows: int, seconds: float) -> float:
    """Return the GFLOP/s of the fastest run."""
    x, out = torch.randn(num_rows, linear.num_inputs), torch.empty(num_rows, linear.num_outputs)
    run = threads.library.linear
    arguments = threads.handle, ctypes.byref(linear.struct), num_rows, x.data_ptr(), out.data_ptr()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        run(*arguments)
        shortest = min(shortest, time.perf_counter() - started)
    return 2e-9 * num_rows * linear.num_inputs * linear.num_outputs / shortest


def compare(library: Library, arguments: argparse.Namespace) -> Table:
    """Return the best and the median rate of each block format relative to Q4_1, measured in turn."""
    threads, shape = ThreadPool(library, 1), (arguments.num_outputs, arguments.num_inputs)
    input_format = InputFormat[arguments.compare.upper()]
    formats = [item for item in WeightFormat if item.has_blocks]
    layers = {
        item: PackedLinear(library, [random_blocks(item, *shape)], item, input_format=input_format) for item in formats
    }
    table = Table(title=f"Rates relative to Q4_1, {library.isa}, {arguments.compare} input, [{shape[0]}, {shape[1]}]")
    for column in ("format", *(f"{count} row{'s' * (count > 1)}" for count in arguments.num_rows)):
        table.add_column(column, justify="right")
    cells: dict[WeightFormat, list[str]] = {item: [] for item in formats}
    for count in arguments.num_rows:
        rounds = [
            {item: rate(layer, threads, count, arguments.seconds / 10) for item, layer in layers.items()}
            for _ in range(10)
        ]
        best = {item: max(figures[item] for figures in rounds) for item in formats}
        for item in formats:
            ratio = statistics.median(figures[item] / figures[WeightFormat.Q4_1] for figures in rounds)
            cells[item].append(f"{best[item] / best[WeightFormat.Q4_1]:.2f} ({ratio:.2f})")
    for item in formats:
        table.add_row(item.name, *cells[item])
    return table


def main() -> None:
    """Print one row for each input format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-outputs", type=int, default=1536)
    parser.add_argument(
        "--num-inputs",
        type=int,
        help="Number of inputs. [576; 768 with --compare, since some formats need a multiple of 256]",
    )
    parser.add_argument("--num-rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="Seconds spent on each measurement. [0.5]")
    parser.add_argument(
        "--compare",
        choices=("f32", "int8", "int16"),
        help="Compare all formats with Q4_1, with the input rounded to this type.",
    )
    arguments = parser.parse_args()
    arguments.num_inputs = arguments.num_inputs or (768 if arguments.compare else 576)
    library = load_library()
    if library is None:
        raise SystemExit("the CPU kernels are not available on this machine")
    if arguments.compare:
        Console(width=140).print(compare(library, arguments))
        return
    threads = ThreadPool(library, 1)
    blocks = random_blocks(WeightFormat.Q4_1, arguments.num_outputs, arguments.num_inputs)
    table = Table(title=f"GFLOP/s of one thread, Q4_1 weights [{arguments.num_outputs}, {arguments.num_inputs}]")
    for column in (f"{library.isa}, input as", *(f"{count} row{'s' * (count > 1)}" for count in arguments.num_rows)):
        table.add_column(column, justify="right")
    for input_format in InputFormat:
        linear = PackedLinear(library, [blocks], WeightFormat.Q4_1, input_format=input_format)
        rates = (rate(linear, threads, count, arguments.seconds) for count in arguments.num_rows)
        table.add_row(input_format.name.lower(), *(f"{value:.0f}" for value in rates))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
