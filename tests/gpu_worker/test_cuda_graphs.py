"""Padding, layout and choice of graphs, with a recorder that runs what it recorded again, eagerly, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_worker.cuda_graphs import GraphDecoder, graph_sizes
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import ForwardInputs, Probe

CPU = torch.device("cpu")


class FakeDecoder:
    """Logits [a, b]: the token id times 10 plus the position; the sum of the row's blocks up to its length."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []
        self.slots: list[int] = []

    def use_cache(self, kv: KvCache) -> None:
        raise NotImplementedError

    def logits(self, last: Tensor) -> Tensor:
        raise NotImplementedError

    def place_adapter(self, adapter: object) -> object:
        raise AssertionError("no adapter is asked for")

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        assert probe is None
        self.num_rows.append(inputs.context_lens.shape[0])
        self.slots = inputs.slot_mapping.tolist()
        sampled = inputs.sampled.long()
        firsts = (inputs.token_ids * 10 + inputs.positions)[sampled]
        rows = torch.bucketize(sampled, inputs.query_starts[1:], right=True)
        blocks = [int(inputs.block_tables[row, : int(inputs.context_lens[row])].sum()) for row in rows.tolist()]
        return torch.stack((firsts, torch.tensor(blocks)), dim=1).float()


class Replays:
    """Stands in for CUDA graphs: a replay runs the recorded function."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def replay() -> None:
            run()

        return replay


def decode_inputs(num_rows: int, num_blocks: int = 2) -> ForwardInputs:
    counts = torch.arange(num_rows + 1, dtype=torch.int32)
    return ForwardInputs(
        token_ids=counts[1:] * 7,
        positions=torch.ones(num_rows, dtype=torch.int32),
        slot_mapping=counts[:-1] + 100,
        query_starts=counts,
        context_lens=torch.full((num_rows,), 2, dtype=torch.int32),
        block_tables=torch.stack([counts[1:]] * num_blocks, dim=1),
        sampled=counts[:-1],
    )


def expected(num_rows: int) -> list[list[float]]:
    return [[70.0 * i + 1, 2.0 * i] for i in range(1, num_rows + 1)]


def graph_decoder(decoder: FakeDecoder, recorder: Replays | None, max_batch_size: int = 20) -> GraphDecoder:
    made = GraphDecoder(
        decoder,
        CPU,
        max_batch_size=max_batch_size,
        max_num_tokens=64,
        max_blocks=5,
        make_recorder=None if recorder is None else lambda: recorder,
    )
    made.capture()
    decoder.num_rows.clear()
    return made


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (50, [1, 2, 4, 8, 16, 32, 48, 50])],
)
def test_sizes(limit: int, sizes: list[int]) -> None:
    assert graph_sizes(limit) == sizes


def test_graphs_are_recorded_largest_first() -> None:
    decoder, recorder = FakeDecoder(), Replays()
    GraphDecoder(
        decoder, CPU, max_batch_size=20, max_num_tokens=64, max_blocks=5, make_recorder=lambda: recorder
    ).capture()
    # The first run shows how large the logits are.
    assert decoder.num_rows == [20, 20, 16, 8, 4, 2, 1]
    assert recorder.num_recorded == 6


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 2), (3, 4), (9, 16), (17, 20), (20, 20)])
def test_decoding_pads_to_the_next_size(num_rows: int, padded: int) -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, Replays())
    # A larger step first leaves its rows behind in the buffers.
    assert graphs.forward(decode_inputs(20)).tolist() == expected(20)
    assert graphs.forward(decode_inputs(num_rows)).tolist() == expected(num_rows)
    assert decoder.num_rows == [20, padded]
    assert decoder.slots == [100 + i for i in range(num_rows)] + [-1] * (padded - num_rows)


@pytest.mark.parametrize("recorder", [None, Replays()])
def test_other_steps_run_eagerly(recorder: Replays | None) -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, recorder)
    inputs = ForwardInputs(
        token_ids=torch.tensor([3, 4, 5], dtype=torch.int32),
        positions=torch.tensor([0, 1, 1], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1, 9], dtype=torch.int32),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_lens=torch.tensor([2, 2], dtype=torch.int32),
        block_tables=torch.tensor([[5, 6], [7, 8]], dtype=torch.int32),
        sampled=torch.tensor([1, 2], dtype=torch.int32),
    )
    assert graphs.forward(inputs).tolist() == [[41, 11], [51, 15]]
    assert decoder.num_rows == [2]
