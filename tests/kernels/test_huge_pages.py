"""Allocation of memory for packed weights."""

import torch

from kernels.cpu.huge_pages import empty_bytes


def test_tensors_share_chunks_without_overlap() -> None:
    sizes = [1, 70_001, 65_536, 100_000, 40 << 20, 70_000, 31 << 20, 3 << 20]
    tensors = [empty_bytes(size) for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (size,)
        assert bool((tensor == value).all())
        assert tensor.data_ptr() % 64 == 0
