"""How a token was chosen: the output `sampling.K`, as specified in protos/generation.proto (AdditionalOutput)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import RowTensor
from gpu_worker.sampling.distribution import MIN_TEMPERATURE, threshold, weights
from gpu_worker.sampling.uniforms import uniforms


@dataclass(frozen=True, slots=True)
class Stages:
    """A row's logits [vocab_size] before, between and after the changes, and its grammar's mask.

    Attributes:
        raw: The model's.
        steered: After everything but the grammar.
        final: Those from which the token was chosen.
        mask: uint8 [bytes], as in `Constraints`; None if there is no grammar.
    """

    raw: Tensor
    steered: Tensor
    final: Tensor
    mask: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class _Draw:
    """The distribution from which a token was drawn.

    Attributes:
        kept: Float32 [vocab_size]: weights, 0 for tokens that cannot be drawn.
        least: The smallest weight that can be drawn.
        number: The random number; NaN if the choice was greedy.
    """

    kept: Tensor
    least: float
    number: float


def trace(rows: Rows, row: int, stages: Stages, token: int, top_p: float) -> Iterator[RowTensor]:
    """Yield the tensors about `token`, which is the row's next one; `top_p` is the one that applies to it."""
    raw, steered, final = (values.cpu() for values in (stages.raw, stages.steered, stages.final))
    draw = _draw(rows, row, final, token, top_p)
    sums = torch.cumsum(draw.kept, dim=0, dtype=torch.float64)
    total = float(sums[-1])
    end = float(sums[token])
    bounds = (end - float(draw.kept[token])) / total, end / total
    num_allowed = len(raw)
    if stages.mask is not None:
        num_allowed = int(np.unpackbits(stages.mask, bitorder="little")[: len(raw)].sum())
    doubles = np.array([draw.number, *bounds], dtype="<f8").view("<i4")
    singles = np.array([rows.temperature[row], top_p, draw.least / total], dtype="<f4").view("<i4")
    counts = np.array([num_allowed, int((draw.kept > 0).sum())], dtype="<i4")
    values = np.concatenate((doubles, singles, counts))[None]
    likeliest = raw.sort(descending=True, stable=True).indices
    index = rows.num_sampled(row)
    for count in rows.outputs[row].sampling:
        ids = torch.cat((torch.tensor([token]), likeliest[:count]))
        columns = raw[ids], steered[ids], final[ids], (draw.kept[ids] / total).float()
        about = torch.stack(columns, dim=1).view(1, -1)
        yield RowTensor(row, f"sampling.{count}", about.numpy(), index, False)
        yield RowTensor(row, f"sampling.{count}.ids", ids.int()[None].numpy(), index, False)
        yield RowTensor(row, f"sampling.{count}.draw", values, index, False)


def _draw(rows: Rows, row: int, final: Tensor, token: int, top_p: float) -> _Draw:
    temperature = float(rows.temperature[row])
    if temperature <= 0:
        return _Draw(torch.zeros_like(final).index_fill_(0, torch.tensor([token]), 1.0), 1.0, float("nan"))
    # The same operations as in Sampler: kernels give the same bits.
    limit = np.maximum(np.float32(temperature), np.float32(MIN_TEMPERATURE))
    found = weights(final[None], torch.tensor([limit]))
    least = torch.from_numpy(rows.min_p[row : row + 1])[:, None]
    top_k = rows.top_k[row : row + 1]
    if top_k[0] > 0 or top_p < 1.0:
        least = torch.maximum(least, threshold(found, top_k, np.array([top_p], dtype=np.float32)))
    number = uniforms(rows.seeds[row : row + 1], rows.sequence_indices[row : row + 1], rows.lengths[row : row + 1])
    return _Draw((found * (found >= least))[0], float(least), float(number[0]))
