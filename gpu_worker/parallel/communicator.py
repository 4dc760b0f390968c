"""Tensor communication between ranks through torch.distributed: NCCL between GPUs, gloo on CPUs. Small sums between the
GPUs of a host, and sums between CPU ranks of a host, use shared memory.

All ranks of a stage must make the same calls in the same order; so must both ends of a link between stages.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shared_sums import SharedSums, can_share, find_memory, offer_memory
from gpu_worker.parallel.symmetric_sums import symmetric_sum

if TYPE_CHECKING:
    from kernels.triton.rank_sum import RankSum

logger = logging.getLogger(__name__)

# Longer than any pause of a healthy rank within a step; the rank monitor detects dead ranks earlier.
_TIMEOUT = timedelta(minutes=10)
# Maximum number of tensors that a CPU rank may have sent before their receivers accept them.
_MAX_SENDS = 8


class RankCommunicator:
    """Communication of this rank with the other ranks."""

    def __init__(self, ranks: Ranks, device: torch.device, store: Store, *, is_ordered: bool) -> None:
        """Connect all ranks.

        Args:
            store: The group's rendezvous store.
            is_ordered: Whether sums over more than two ranks are computed in rank order, so that their bits do not
                depend on the number of rows. On a CPU this is always the case.
        """
        self.ranks, self.device = ranks, device
        self._is_ordered = ranks.tensor_size > 2 and (is_ordered or device.type == "cpu")
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=_TIMEOUT,
            device_id=device if is_gpu else None,
        )
        # Creating a process group is collective: every rank takes part in creating all of them.
        groups = [dist.new_group(self._of_stage(stage), timeout=_TIMEOUT) for stage in range(ranks.pipeline_size)]
        self._stage_group = groups[ranks.stage]
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        # Created in the first sum, which is part of the warm-up.
        self._has_tried_one_shot = False
        self._one_shot: tuple[RankSum, object] | None = None
        self._shared = None if is_gpu else self._share_memory(store)

    def _share_memory(self, store: Store) -> SharedSums | None:
        """Return memory shared by all ranks of the stage; None if they cannot share any."""
        size, rank = self.ranks.tensor_size, self.ranks.tensor_rank
        if not can_share(size):
            return None
        name, offered = f"sums of stage {self.ranks.stage}", None
        memory: mmap.mmap | None
        if rank == 0:
            offered = offer_memory(store, name, size)
            memory = offered[0] if offered is not None else None
        else:
            memory = find_memory(store, name)
        has_memory = torch.tensor([memory is not None], dtype=torch.int32)
        dist.all_reduce(has_memory, op=dist.ReduceOp.MIN, group=self._stage_group)
        if offered is not None:
            os.close(offered[1])
        if memory is None or not has_memory:
            logger.info("the ranks of the stage share no memory, so they sum through gloo")
            return None
        return SharedSums(memory, rank, size, _TIMEOUT.total_seconds())

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the stage. With two ranks, or ordered sums, a row's bits do not depend on other
        rows.
        """
        if self.ranks.tensor_size == 1:
            return x
        x = x.contiguous()
        if self._shared is not None and x.dtype == torch.float32:
            return self._shared.sum(x)
        if x.is_cuda:
            if not self._has_tried_one_shot:
                self._has_tried_one_shot = True
                self._one_shot = symmetric_sum(self.ranks, self._stage_group, x.dtype, x.device)
            if self._one_shot is not None and self._one_shot[0].takes(x):
                return self._one_shot[0](x)
        if not self._is_ordered:
            dist.all_reduce(x, group=self._stage_group)
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks.tensor_size)]
        dist.all_gather(parts, x, group=self._stage_group)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def join(self, x: Tensor) -> Tensor:
        """Gather x [N, K] from all ranks into [N, size * K] on the stage's first rank; return [N, 0] on the others."""
        if self.ranks.tensor_size == 1:
            return x
        is_target = self.ranks.tensor_rank == 0
        if not len(x):
            return x.new_empty(0, x.shape[1] * self.ranks.tensor_size if is_target else 0)
        parts = [torch.empty_like(x) for _ in range(self.ranks.tensor_size)] if is_target else None
        dist.gather(x.contiguous(), parts, dst=self._of_stage(self.ranks.stage)[0], group=self._stage_group)
        return torch.cat(parts, dim=1) if parts is not None else x.new_empty(len(x), 0)

    @property
    def share_tokens(self) -> Callable[[Tensor], None] | None:
        """Return the operation by which rank 0 sends tokens to the ranks that embed them; None if this rank has no
        part.
        """
        return self.share if self.ranks.stage == 0 and self.ranks.tensor_size > 1 else None

    def share(self, x: Tensor) -> None:
        """Broadcast x from the stage's first rank to the other ranks of the stage."""
        dist.broadcast(x, src=self._of_stage(self.ranks.stage)[0], group=self._stage_group)

    def least(self, number: int) -> int:
        """Return the minimum over all ranks of all stages."""
        value = torch.tensor([number], device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value.item())

    def send(self, x: Tensor, stage: int) -> None:
        """Send `x` to the corresponding rank of another stage. On a CPU, do not wait until it is received."""
        x = x.contiguous()
        if x.is_cuda:
            dist.send(x, self._peer(stage))
            return
        work = dist.isend(x, self._peer(stage))
        assert work is not None
        self._sends.append((work, x))
        if len(self._sends) > _MAX_SENDS:
            self._sends.popleft()[0].wait()

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Return a tensor with the shape and type of `like`, received from the corresponding rank of another stage."""
        dist.recv(like, self._peer(stage))
        return like

    def _peer(self, stage: int) -> int:
        return stage * self.ranks.tensor_size + self.ranks.tensor_rank

    def _of_stage(self, stage: int) -> list[int]:
        return list(range(stage * self.ranks.tensor_size, (stage + 1) * self.ranks.tensor_size))
