"""One-shot sums of small tensors between the GPUs of a host, through PyTorch's symmetric memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpu_worker.parallel.ranks import Ranks

if TYPE_CHECKING:
    from kernels.triton.rank_sum import RankSum

logger = logging.getLogger(__name__)

_REASONS = (ImportError, AttributeError, NotImplementedError, RuntimeError)

# Size of the largest sum: 32 rows of 4,096 numbers in 16 bits. Every rank reads all parts, so NCCL is better for larger
# sums.
NUM_BYTES = 1 << 18


def symmetric_sum(
    ranks: Ranks, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> tuple[RankSum, object] | None:
    """Return the one-shot sum over the ranks of a stage, and the memory to keep for it. All ranks of the stage must
    call this together. If any of them lacks Triton, or GPUs that can address each other's memory, return None on all of
    them.
    """
    memory, addresses = None, None

    def all_ranks(*, can: bool) -> bool:
        least = torch.tensor([can], dtype=torch.int32, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return bool(least.item())

    try:
        # Imported here because they need Triton and a PyTorch build for GPUs.
        from torch.distributed import _symmetric_memory as symmetric

        from kernels.triton.rank_sum import RankSum, signal_bytes

        size = 2 * NUM_BYTES + signal_bytes(NUM_BYTES, ranks.tensor_size)
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        memory.zero_()
    except _REASONS as error:
        logger.info("the ranks sum through NCCL: %s", error)
        memory = None
    # A rank that failed would not join the rendezvous, and the others would wait for it.
    if not all_ranks(can=memory is not None) or memory is None:
        return None
    try:
        handle = symmetric.rendezvous(memory, group)
        addresses = list(handle.buffer_ptrs)
    except _REASONS as error:
        logger.info("the ranks sum through NCCL: %s", error)
    # A rank must not signal another rank before that rank has zeroed its memory.
    if not all_ranks(can=addresses is not None) or addresses is None:
        return None
    parts = torch.tensor(addresses, dtype=torch.int64, device=device)
    add = RankSum(parts, parts + 2 * NUM_BYTES, ranks.tensor_rank, NUM_BYTES, dtype)
    return add, (memory, handle)
