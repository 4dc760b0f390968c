"""Random numbers that depend only on (seed, sequence, position), so that any worker can reproduce them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: NDArray[np.uint64], sequence_indices: NDArray[np.int32], positions: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, sequence, position); all arrays are [num_rows].

    Each of the three is mixed in by a round of SplitMix64's finalizer.
    """
    mixed = _mix(seeds + _STEP)
    mixed = _mix((mixed ^ sequence_indices.astype(np.uint64)) + _STEP)
    mixed = _mix((mixed ^ positions.astype(np.uint64)) + _STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
