"""GGUF block types converted to the kernels' format, compared with the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from gpu_worker.models.weights.gguf_blocks import from_gguf
from gpu_worker.models.weights.weight import Weight

KINDS = gguf.GGMLQuantizationType
NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
# Offsets of the float16 fields in a block; random bytes there might not be finite numbers.
HALVES = {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q5_1": [0, 2], "Q4_1": [0, 2]}


def random_rows(kind: gguf.GGMLQuantizationType, num_rows: int, num_columns: int) -> np.ndarray:
    """Return rows of random blocks."""
    generator = np.random.default_rng(len(kind.name))
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_rows, num_columns // block_size, block_bytes), dtype=np.uint8)
    if kind is KINDS.MXFP4:
        blocks[..., 0] = generator.integers(2, 250, blocks.shape[:-1])
    else:
        for place in HALVES.get(kind.name, [0]):
            scales = (generator.standard_normal((*blocks.shape[:-1], 1)) * 0.01).astype(np.float16)
            blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("name", NAMES)
def test_every_type_stands_for_what_its_definition_says(name: str) -> None:
    kind = KINDS[name]
    rows = random_rows(kind, 7, 768)
    blocks = from_gguf(kind, torch.from_numpy(rows))
    assert blocks is not None
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    # Values are exact except for the rounding of scale * q + minimum in float32, which GGUF's definition computes in
    # another order.
    torch.testing.assert_close(
        Weight(*blocks, 768).dense(), expected, rtol=2e-7, atol=2e-7 * float(expected.abs().max())
    )


def test_a_scale_out_of_range_of_q4_1_is_not_changed() -> None:
    rows = torch.zeros(1, 18, dtype=torch.uint8)
    rows[:, :2] = torch.tensor([16384.0], dtype=torch.float16).view(torch.uint8)
    assert from_gguf(KINDS.Q4_0, rows) is None
