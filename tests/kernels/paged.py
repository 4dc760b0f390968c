"""A random batch over a paged cache, in the layout that a worker uses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Sequences whose queries are at the last query_lens[i] positions of context_lens[i]; blocks are in random
    order.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    positions: Tensor
    num_blocks: int


def paged_batch(context_lens: Sequence[int], query_lens: Sequence[int], block_size: int) -> PagedBatch:
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, dtype=torch.int32)
    tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    taken = 0
    for i, count in enumerate(counts):
        tables[i, :count] = order[taken : taken + count]
        taken += count
    positions = [torch.arange(c - q, c) for c, q in zip(context_lens, query_lens, strict=True)]
    slots = [tables[i, p // block_size].long() * block_size + p % block_size for i, p in enumerate(positions)]
    return PagedBatch(
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(list(context_lens), dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots).int(),
        positions=torch.cat(positions).int(),
        num_blocks=num_blocks,
    )
