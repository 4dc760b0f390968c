"""How fast one thread multiplies with packed weights: `python -m benchmarks.kernel_rates`.

The shortest of many runs of some tenths of a millisecond counts, so that other work on the machine hardly matters.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from kernels.cpu import InputFormat, PackedLinear, ThreadPool, WeightFormat, load_library

NUM_ROWS = (1, 2, 4, 8, 16, 64, 256)


def random_blocks(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Rows of Q4_1 blocks with scales and minimums that are finite."""
    shape = (num_outputs, num_inputs // 32)
    scales = torch.rand(*shape, 2).half().view(torch.uint8)
    return torch.cat((scales, torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)), dim=-1).flatten(1)


def rate(linear: PackedLinear, threads: ThreadPool, num_rows: int, seconds: float) -> float:
    """Billions of multiplications and additions per second, of the fastest run."""
    x = torch.randn(num_rows, linear.num_inputs)
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        linear(x, threads)
        shortest = min(shortest, time.perf_counter() - started)
    return 2e-9 * num_rows * linear.num_inputs * linear.num_outputs / shortest


def main() -> None:
    """Prints one row for each rounding of the input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-outputs", type=int, default=1536)
    parser.add_argument("--num-inputs", type=int, default=576)
    parser.add_argument("--num-rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="For each figure. [0.5]")
    arguments = parser.parse_args()
    library = load_library()
    if library is None:
        raise SystemExit("the CPU kernels do not run here")
    threads = ThreadPool(library, 1)
    blocks = random_blocks(arguments.num_outputs, arguments.num_inputs)
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
