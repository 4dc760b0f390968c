"""Padding, layout and choice of graphs, with a recorder that replays eagerly on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.batch.staging import PinnedBuffers
from gpu_worker.cuda_graphs import GraphDecoder, Shape, graph_sizes, mixed_shapes
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.arena import PlacedAdapter
from gpu_worker.lora.inputs import AdapterTokens, VirtualTokens
from gpu_worker.models.decoder import ForwardInputs, Probe

CPU = torch.device("cpu")


class FakeDecoder:
    """Returns logits [a, b]: a is ten times the token id plus the position, b is the sum of the row's blocks up to its
    length.
    """

    def __init__(self) -> None:
        self.num_rows: list[int] = []
        self.slots: list[int] = []
        self.max_queries: int | None = None

    def use_cache(self, kv: KvCache) -> None:
        raise NotImplementedError

    def logits(self, last: Tensor) -> Tensor:
        raise NotImplementedError

    def place_adapter(self, adapter: object) -> object:
        raise AssertionError("an adapter was requested")

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        assert probe is None
        self.num_rows.append(inputs.context_lens.shape[0])
        self.slots = inputs.slot_mapping.tolist()
        self.max_queries = inputs.max_queries
        sampled = inputs.sampled.long()
        firsts = (inputs.token_ids * 10 + inputs.positions)[sampled]
        # Padding rows may sample a token that belongs to no sequence.
        rows = torch.bucketize(sampled, inputs.query_starts[1:], right=True).clamp(max=len(inputs.context_lens) - 1)
        blocks = [int(inputs.block_tables[row, : int(inputs.context_lens[row])].sum()) for row in rows.tolist()]
        return torch.stack((firsts, torch.tensor(blocks)), dim=1).float()


class Replays:
    """A stand-in for CUDA graphs whose replay calls the recorded function."""

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
    # The first run determines the size of the logits. Steps of 64 and 32 tokens have 20 and 8 rows.
    assert decoder.num_rows == [20, 20, 20, 20, 16, 8, 8, 8, 4, 2, 1]
    assert recorder.num_recorded == 10


def test_shapes_of_mixed_steps() -> None:
    assert mixed_shapes(4, 64) == [Shape(4, 32), Shape(4, 64)]
    assert mixed_shapes(100, 2048)[:8] == [
        *(Shape(8, 32), Shape(31, 32), Shape(8, 64), Shape(63, 64)),
        *(Shape(8, 128), Shape(64, 128), Shape(100, 128), Shape(8, 192)),
    ]
    assert not mixed_shapes(4, 31)


def test_many_sequences_do_not_pad_a_mixed_step_to_more_tokens() -> None:
    sizes = (32, 64, 128, 192, 256, 384, 512)
    shapes = mixed_shapes(256, 2048)
    for num_tokens in range(2, 513):
        for num_rows in (1, 9, 65, num_tokens - 1):
            if num_rows < num_tokens and num_rows <= 256:
                found = next(shape for shape in shapes if shape.takes(num_tokens, num_rows, num_rows))
                assert found.num_tokens == min(size for size in sizes if size >= num_tokens)


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 2), (3, 4), (9, 16), (17, 20), (20, 20)])
def test_decoding_pads_to_the_next_size(num_rows: int, padded: int) -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, Replays())
    # A larger step runs first, so the buffers still contain its rows.
    assert graphs.forward(decode_inputs(20)).tolist() == expected(20)
    assert graphs.forward(decode_inputs(num_rows)).tolist() == expected(num_rows)
    assert decoder.num_rows == [20, padded]
    assert decoder.slots == [100 + i for i in range(num_rows)] + [-1] * (padded - num_rows)


def mixed_inputs() -> ForwardInputs:
    return ForwardInputs(
        token_ids=torch.tensor([3, 4, 5], dtype=torch.int32),
        positions=torch.tensor([0, 1, 1], dtype=torch.int32),
        slot_mapping=torch.tensor([0, 1, 9], dtype=torch.int32),
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_lens=torch.tensor([2, 2], dtype=torch.int32),
        block_tables=torch.tensor([[5, 6], [7, 8]], dtype=torch.int32),
        sampled=torch.tensor([1, 2], dtype=torch.int32),
    )


@pytest.mark.parametrize(("recorder", "num_rows"), [(None, 2), (Replays(), 8)])
def test_a_prompt_beside_a_decode_is_padded_or_runs_eagerly(recorder: Replays | None, num_rows: int) -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, recorder)
    graphs.forward(decode_inputs(20))
    assert graphs.forward(mixed_inputs()).tolist() == [[41, 11], [51, 15]]
    assert decoder.num_rows[1:] == [num_rows]
    assert decoder.slots == [0, 1, 9] + [-1] * (29 if recorder else 0)
    assert decoder.max_queries == (32 if recorder else None)


@pytest.mark.parametrize(("num_drafts", "num_rows"), [(7, 8), (8, 20)])
def test_drafts_are_verified_in_a_graph_with_a_row_for_each_sampled_token(num_drafts: int, num_rows: int) -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, Replays())
    tokens = torch.arange(1 + num_drafts, dtype=torch.int32)
    inputs = ForwardInputs(
        token_ids=tokens,
        positions=tokens,
        slot_mapping=tokens,
        query_starts=torch.tensor([0, 1 + num_drafts], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
        block_tables=torch.tensor([[5, 6]], dtype=torch.int32),
        sampled=tokens,
    )
    assert graphs.forward(inputs).tolist() == [[11 * token, 11] for token in tokens.tolist()]
    assert decoder.num_rows == [num_rows]


def test_steps_that_are_too_large_run_eagerly() -> None:
    decoder = FakeDecoder()
    graphs = graph_decoder(decoder, Replays())
    graphs.forward(decode_inputs(2))
    assert graphs.best(2) is not None
    tokens = torch.arange(65, dtype=torch.int32)
    inputs = replace(
        mixed_inputs(),
        token_ids=tokens,
        positions=tokens,
        slot_mapping=tokens,
        query_starts=torch.tensor([0, 64, 65], dtype=torch.int32),
    )
    graphs.forward(inputs)
    assert decoder.num_rows == [2, 2]
    assert graphs.best(2) is None


def test_an_eager_step_in_which_every_token_is_sampled_has_room_for_its_inputs() -> None:
    decoder, most = FakeDecoder(), torch.zeros(64, dtype=torch.int32)
    graphs = GraphDecoder(decoder, CPU, max_batch_size=4, max_num_tokens=64, max_blocks=4, takes_adapters=True)
    inputs = ForwardInputs(
        token_ids=most,
        positions=most,
        slot_mapping=most,
        query_starts=torch.arange(5, dtype=torch.int32) * 16,
        context_lens=torch.full((4,), 4, dtype=torch.int32),
        block_tables=torch.ones((4, 4), dtype=torch.int32),
        sampled=torch.arange(64, dtype=torch.int32),
        adapters=AdapterTokens(("a",), (PlacedAdapter(0),), most),
    )
    assert graphs.forward(inputs).tolist() == [[0, 4]] * 64


def test_steps_with_probes_or_virtual_tokens_run_eagerly() -> None:
    class Others(FakeDecoder):
        def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            seen.append((inputs.virtual, probe))
            return super().forward(inputs)

    decoder, seen = Others(), list[tuple[object, object]]()
    graphs = graph_decoder(decoder, Replays())
    virtual, probe = VirtualTokens(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)), Probe(frozenset())
    for inputs, given in ((replace(decode_inputs(3), virtual=virtual), None), (decode_inputs(3), probe)):
        assert graphs.forward(inputs, given).tolist() == expected(3)
        assert graphs.best(3) is None
    assert decoder.num_rows == [3, 3]  # not padded to 4
    assert [(a is virtual, b is probe) for a, b in seen[-2:]] == [(True, False), (False, True)]


def test_capturing_writes_no_kv() -> None:
    class Slots(FakeDecoder):
        def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            slots.update(inputs.slot_mapping.tolist())
            return super().forward(inputs, probe)

    slots: set[int] = set()
    graphs = graph_decoder(Slots(), Replays())
    graphs.forward(decode_inputs(20))
    assert slots == {-1, *range(100, 120)}
    slots.clear()
    graphs.capture()
    assert slots == {-1}


def test_constants_that_a_model_changes_are_new_in_each_step() -> None:
    class WithConstant(FakeDecoder):
        def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            return super().forward(inputs, probe) + torch.tensor(1.0).add_(1)

    graphs = graph_decoder(WithConstant(), Replays())
    for _ in range(2):
        assert graphs.forward(decode_inputs(1)).tolist() == [[73, 4]]


def test_block_tables_are_sent_whole_or_as_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In logits [a, b], b is the sum of the two blocks of a row. Block tables are sent as changes if there are at most
    as many changes as the graph has rows.
    """
    sizes: list[int] = []
    send = PinnedBuffers.send

    def watched(buffers: PinnedBuffers, source: Tensor, target: Tensor) -> None:
        sizes.append(len(source))
        send(buffers, source, target)

    monkeypatch.setattr(PinnedBuffers, "send", watched)
    graphs = graph_decoder(FakeDecoder(), Replays())
    inputs = decode_inputs(4)
    assert graphs.forward(inputs).tolist() == expected(4)  # eight block numbers
    assert graphs.forward(inputs).tolist() == expected(4)
    tables = inputs.block_tables.clone()
    tables[1, 1], tables[3, 0] = 50, 0
    assert graphs.forward(replace(inputs, block_tables=tables))[:, 1].tolist() == [2, 52, 6, 4]
    # A step with fewer and shorter rows does not change the entries beyond its own. The step in between sets the
    # changed entry back to 2, so it is sent again.
    assert graphs.forward(decode_inputs(2)).tolist() == expected(2)
    assert graphs.forward(replace(inputs, block_tables=tables))[:, 1].tolist() == [2, 52, 6, 4]
    alone = sum(Shape(4, 4).sizes())
    assert sizes == [alone + 8, alone, alone, sum(Shape(2, 2).sizes()), alone]
    graphs.capture()
    assert graphs.forward(inputs).tolist() == expected(4)
    graphs.capture()
    assert graphs.forward(replace(inputs, block_tables=torch.zeros_like(tables)))[:, 1].tolist() == [0, 0, 0, 0]


def test_random_block_tables_are_those_on_the_device() -> None:
    graphs = graph_decoder(FakeDecoder(), Replays())
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(0, 100, (20, 5), generator=generator, dtype=torch.int32)
    for _ in range(40):
        num_rows, num_blocks, num_changes = torch.randint(1, 6, (3,), generator=generator).tolist()
        changed = torch.randint(0, 100, (num_changes,), generator=generator)
        tables.view(-1)[changed] = torch.randint(0, 100, (num_changes,), generator=generator, dtype=torch.int32)
        inputs = decode_inputs(num_rows)
        lens = torch.full((num_rows,), num_blocks, dtype=torch.int32)
        inputs = replace(inputs, block_tables=tables[:num_rows, :num_blocks].clone(), context_lens=lens)
        assert graphs.forward(inputs)[:, 1].tolist() == tables[:num_rows, :num_blocks].sum(1).tolist()


def test_a_rank_without_logits_replays_graphs_too() -> None:
    class OtherRank(FakeDecoder):
        def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            return super().forward(inputs, probe)[:, :0]

    graphs = graph_decoder(OtherRank(), Replays())
    assert graphs.forward(decode_inputs(3)).shape == (3, 0)
    assert graphs.forward(mixed_inputs()).shape == (2, 0)


def test_a_graph_gives_the_likeliest_tokens_and_feeds_them() -> None:
    graphs = graph_decoder(FakeDecoder(), Replays())
    graphs.feed(torch.tensor([9, 9, 9], dtype=torch.int32))
    graphs.forward(decode_inputs(3))
    best = graphs.best(3)
    assert best is not None
    assert best.tolist() == [0, 0, 0]
    ahead = replace(decode_inputs(3), token_ids=torch.tensor([-1, -2, -3], dtype=torch.int32))
    assert graphs.forward(ahead).tolist() == [[1, 2], [1, 4], [1, 6]]
    graphs.feed(torch.tensor([5, -1, 6], dtype=torch.int32))
    # Rows 1 to 3 use the second, first and third of these tokens. The second is -1, since its logits were not finite,
    # and is replaced by token 0.
    inputs = replace(decode_inputs(3), token_ids=torch.tensor([-2, -1, -3], dtype=torch.int32))
    assert graphs.forward(inputs).tolist() == [[1, 2], [51, 4], [61, 6]]


def test_an_eager_step_uses_the_tokens_that_were_fed() -> None:
    graphs = graph_decoder(FakeDecoder(), None)
    graphs.feed(torch.tensor([5, 6], dtype=torch.int32))
    inputs = replace(decode_inputs(3), token_ids=torch.tensor([-2, 7, -1], dtype=torch.int32))
    assert graphs.forward(inputs).tolist() == [[61, 2], [71, 4], [51, 6]]
