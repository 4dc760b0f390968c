from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import add_lora
from kernels.cpu import DecoderDims, PackedLora
from kernels.cpu.lora import lora_shapes
from tests.kernels import exact
from tests.kernels.libraries import each_build
from tests.kernels.models import RandomDecoder, random_decoder
from tests.kernels.paged import PagedBatch, paged_batch

# These widths are not multiples of the vector length.
DIMS = DecoderDims(hidden_size=76, num_heads=6, num_kv_heads=2, head_dim=24, ffn_size=101, eps=1e-5, scale=24**-0.5)
NUM_LAYERS = 2
Pairs = list[dict[str, tuple[Tensor, Tensor]]]


def random_adapter(rank: int, modules: str) -> Pairs:
    shapes = lora_shapes(DIMS)
    return [
        {m: (torch.randn(rank, shapes[m][0]) * 0.1, torch.randn(shapes[m][1], rank) * 0.1) for m in modules.split()}
        for _ in range(NUM_LAYERS)
    ]


def merged(decoder: RandomDecoder, adapter: Pairs) -> RandomDecoder:
    """Return the decoder with the products of the adapter added to its weights."""
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
    layers = []
    for layer, pairs in zip(decoder.layers, adapter, strict=True):
        linears = {key: weight.clone() for key, weight in layer.linears.items()}
        starts = dict.fromkeys(linears, 0)
        for module, (_, num_outputs) in lora_shapes(DIMS).items():
            key = fused[module]
            if module in pairs:
                a, b = pairs[module]
                linears[key][starts[key] : starts[key] + num_outputs] += b @ a
            starts[key] += num_outputs
        layers.append(dataclasses.replace(layer, linears=linears))
    return dataclasses.replace(decoder, layers=layers)


ADAPTERS = [None, (8, "q k v o gate up down"), None, (5, "q v"), (1, "up down"), (8, "q k v o gate up down")]
LENGTHS = [5, 9, 1, 40, 3, 1]


class Run:
    """Runs sequences with their adapters on a decoder."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(7)
        self.name = name
        self.decoder = random_decoder(DIMS, NUM_LAYERS, has_bias=True)
        self.hidden = [torch.randn(length, DIMS.hidden_size) for length in LENGTHS]
        self.pairs = [None if item is None else random_adapter(*item) for item in ADAPTERS]
        self.adapters = [None if pairs is None else PackedLora(DIMS, pairs) for pairs in self.pairs]

    def native(self, which: list[int], *, adapted: bool = True, num_threads: int = 2) -> list[Tensor]:
        batch = _batch(which)
        hidden = torch.cat([self.hidden[i] for i in which])
        caches = self.decoder.caches(batch.num_blocks, 16, torch.float32)
        self.decoder.native(self.name, caches, num_threads).forward_layers(
            hidden,
            batch.positions,
            batch.slot_mapping,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            adapters=[self.adapters[i] for i in which] if adapted else None,
        )
        return list(torch.split(hidden, [LENGTHS[i] for i in which]))

    def reference(self, i: int) -> Tensor:
        batch, pairs = _batch([i]), self.pairs[i]
        decoder = self.decoder if pairs is None else merged(self.decoder, pairs)
        return decoder.reference(self.hidden[i], batch, decoder.caches(batch.num_blocks, 16, torch.float32))


def _batch(which: list[int]) -> PagedBatch:
    lengths = [LENGTHS[i] for i in which]
    return paged_batch(lengths, lengths, block_size=16)


@each_build
def test_each_sequence_is_computed_with_its_own_adapter(name: str) -> None:
    run = Run(name)
    for i, found in enumerate(run.native([0, 1, 2, 3, 4, 5])):
        torch.testing.assert_close(found, run.reference(i), rtol=2e-4, atol=2e-4)


@each_build
def test_a_sequence_does_not_depend_on_its_neighbours_adapters(name: str) -> None:
    run = Run(name)
    together = run.native([0, 1, 2, 3, 4, 5])
    for i, found in enumerate(together):
        assert torch.equal(run.native([i], num_threads=1)[0], found)
    for which in ([5, 3, 1, 0], [2, 4], [0, 2]):
        for i, found in zip(which, run.native(which, num_threads=3), strict=True):
            assert torch.equal(found, together[i])
    assert torch.equal(run.native([0], adapted=False)[0], together[0])
    assert torch.equal(run.native([2], adapted=False)[0], together[2])


@each_build
def test_adapters_that_do_not_fit_are_refused(name: str) -> None:
    run = Run(name)
    pairs = random_adapter(4, "q")
    with pytest.raises(ValueError, match=r"v is \[4, 76\] and \[144, 4\]: expected \[R, 76\], \[48, R\]"):
        PackedLora(DIMS, [{"v": pairs[0]["q"]}])
    run.adapters[0] = PackedLora(DIMS, pairs[:1])
    with pytest.raises(ValueError, match="belongs to another decoder"):
        run.native([0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_adds_each_rows_own_product(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(20, 48).to(dtype), torch.randn(20, 70).to(dtype)[:, :64]
    pairs = exact.lora_pairs([8, 0, 16], 48, 64, dtype)
    values, table = exact.lora_arena(pairs)
    slots = torch.randint(-1, 3, (20,), dtype=torch.int32)
    before, alone = y.clone(), y[4:5].clone()
    add_lora(y, x, values, table, slots, 16)
    assert exact.error(y, exact.lora(before, x, pairs, slots)) < (1e-5 if dtype == torch.float32 else 0.02)
    assert torch.equal(y[slots < 0], before[slots < 0])
    add_lora(alone, x[4:5], values, table, slots[4:5], 16)
    assert torch.equal(alone, y[4:5])
