"""Ranks of `RankSum` in Triton's interpreter, one process each: python -m tests.kernels.rank_sum_process FOLDER NUMBER.

The folder holds a file for the memory of each rank, which stands in for GPU memory, and receives a file with the sums
of each rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels.triton.rank_sum import RankSum, signal_bytes

NUM_BYTES, DTYPE = 4096, torch.float16
# Numbers of elements: small, more than a block, one more than the maximum, and the maximum.
COUNTS = (5, 1500, 2049, 2048)


def addends(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(count, generator=generator).to(DTYPE) for count in COUNTS]


def delay(operation: str, seconds: float) -> None:
    """Make the interpreter wait before each operation of this name."""
    run: Callable[..., Any] = getattr(InterpreterBuilder, operation)

    def late(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return run(*arguments, **keywords)

    setattr(InterpreterBuilder, operation, late)


def run_rank(folder: Path, rank: int, num_ranks: int) -> None:
    # The last rank reads and writes its part so late that the others begin the next sum, and poll its signals
    # meanwhile.
    for operation in ("create_masked_load", "create_masked_store") if rank == num_ranks - 1 else ("create_atomic_rmw",):
        delay(operation, 0.02 if rank == num_ranks - 1 else 0.001)
    size = 2 * NUM_BYTES + signal_bytes(NUM_BYTES, num_ranks)
    memories = [
        torch.from_file(str(folder / f"memory-{other}"), shared=True, size=size, dtype=torch.uint8)
        for other in range(num_ranks)
    ]
    parts = torch.tensor([memory.data_ptr() for memory in memories])
    add = RankSum(parts, parts + 2 * NUM_BYTES, rank, NUM_BYTES, DTYPE)
    sums = [add(x) for x in addends(rank) if add.takes(x)]
    torch.cat(sums).view(torch.uint8).numpy().tofile(folder / f"sums-{rank}")


def main() -> None:
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    # The ranks are processes because the interpreter runs one kernel at a time. They are forked, so that modules are
    # imported only once.
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            run_rank(folder, rank, num_ranks)
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main()
