"""The one-shot sum across ranks, with processes in Triton's interpreter that share memory and run at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from tests.kernels.rank_sum_process import DTYPE, NUM_BYTES, addends

NUM_RANKS = 3


def test_every_rank_gets_the_bits_of_the_sum_in_rank_order(tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        (tmp_path / f"memory-{rank}").write_bytes(bytes(1 << 14))
    command = [sys.executable, "-m", "tests.kernels.rank_sum_process", str(tmp_path), str(NUM_RANKS)]
    subprocess.run(command, check=True, timeout=200)
    expected = addends(0)
    for rank in range(1, NUM_RANKS):
        expected = [total + part for total, part in zip(expected, addends(rank), strict=True)]
    wanted = torch.cat([total for total in expected if total.nbytes <= NUM_BYTES])
    for rank in range(NUM_RANKS):
        found = np.fromfile(tmp_path / f"sums-{rank}", dtype=np.uint8)
        assert torch.equal(torch.from_numpy(found).view(DTYPE), wanted)
