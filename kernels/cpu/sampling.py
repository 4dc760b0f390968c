"""Draws the next token for each row of logits.

A token's weight is e^((logit - highest) / temperature), from 0 to 1, rounded to a multiple of a quantum that is small
enough not to matter and large enough that a float64 holds the sum of a row's weights without rounding. Every sum is
therefore exact: the drawn token depends neither on the order of additions nor on the number of threads or the
instruction set, and is the one that the PyTorch reference in the worker's sampler draws.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.threads import ThreadPool

# The layout is that of MidstreamDraw in csrc/api.h.
_DRAW = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("sequence_index", np.int32),
        ("position", np.int32),
    ]
)
Draws = NDArray[np.void]


def empty_draws(num_rows: int) -> Draws:
    """Return uninitialized sampling parameters for this many rows.

    The fields are temperature (0: greedy), top_k (0: all), top_p and min_p; and seed, sequence_index and position,
    which determine the random number.
    """
    return np.empty(num_rows, dtype=_DRAW)


def draw(threads: ThreadPool, logits: Tensor, rows: NDArray[np.int32], draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw a token for some rows of logits, float32 [N, vocabulary]; rows and draws [S].

    Return the tokens, int32 [S], and the highest logits, float32 [S], which are NaN for rows with a NaN. Greedy rows
    take the first of the highest logits. If the highest logit is not finite, the token is invalid. Raises ValueError
    for wrong shapes.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous() or logits.shape[1] < 1:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}: expected contiguous float32 [N, vocabulary]")
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(logits):
        raise ValueError(f"rows must be in 0..{len(logits) - 1}")
    places = np.ascontiguousarray(rows, dtype=np.int32)
    chosen, highest = torch.empty(len(rows), dtype=torch.int32), torch.empty(len(rows))
    threads.library.draw(
        threads.handle,
        len(rows),
        places.ctypes.data,
        logits.shape[1],
        logits.data_ptr(),
        pointer_to(draws, len(rows)),
        chosen.data_ptr(),
        highest.data_ptr(),
    )
    return chosen, highest


def pointer_to(draws: Draws, num_rows: int) -> int:
    """Return the address of the parameters of this many rows. Raises ValueError if type, shape or layout is wrong."""
    if draws.dtype != _DRAW or draws.shape != (num_rows,) or not draws.flags.c_contiguous:
        raise ValueError(f"draws are {draws.dtype} {list(draws.shape)}: expected contiguous draws [{num_rows}]")
    return draws.ctypes.data
