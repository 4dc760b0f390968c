"""Rank 0's decoder: tells the other ranks what to compute, then computes its own part.

Everything above a decoder (rows, sampling, grammars, drafts, beams) is on rank 0 alone and knows nothing of ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from gpu_worker.batch.step import IntArray
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.models.decoder import Decoder, ForwardInputs, Probe
from gpu_worker.parallel.commands import encode_adapter_layer, encode_forward
from gpu_worker.parallel.frames import FrameSender
from gpu_worker.parallel.links import RankLinks
from gpu_worker.parallel.shard import Shard
from gpu_worker.parallel.shard_adapters import adapter_part
from midstream.errors import InvalidArgumentError
from protos import ranks_pb2


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GroupAdapter:
    """An adapter that every rank has its part of, under this number."""

    number: int
    part: object


class Leader:
    """The other ranks, as the model runner and the decoder see them.

    Attributes:
        has_failed: Whether ranks may be at odds, because something failed while all of them worked on it.
    """

    def __init__(self, sender: FrameSender, links: RankLinks) -> None:
        self.has_failed = False
        self.links = links
        self._sender = sender

    def tell(self, command: ranks_pb2.RankCommand) -> None:
        """Has all other ranks do something."""
        self._sender.send(command.SerializeToString())

    @contextmanager
    def together(self, command: ranks_pb2.RankCommand) -> Iterator[None]:
        """Has all other ranks do what is done within."""
        try:
            self.tell(command)
            yield
        except BaseException:
            self.has_failed = True
            raise

    def lead(self, part: Decoder, shard: Shard) -> LeadingDecoder:
        """All ranks' parts together, given this rank's."""
        return LeadingDecoder(part, shard, self)

    def least_num_blocks(self, num_blocks: int) -> int:
        """The least number of KV blocks that any rank has room for, given this one's."""
        with self.together(ranks_pb2.RankCommand(choose_num_blocks=ranks_pb2.ChooseNumBlocks())):
            return self.links.least(num_blocks)

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Has the others copy blocks."""
        copy = ranks_pb2.CopyBlocks(sources=sources.tolist(), targets=targets.tolist())
        self.tell(ranks_pb2.RankCommand(copy_blocks=copy))

    def record_graphs(self, record: Callable[[], None]) -> None:
        """Records CUDA graphs, on all ranks at once."""
        with self.together(ranks_pb2.RankCommand(record_graphs=ranks_pb2.RecordGraphs())):
            record()

    def stop(self, exit_code: int) -> None:
        """Ends the other ranks."""
        self.tell(ranks_pb2.RankCommand(stop=ranks_pb2.StopRank(exit_code=exit_code)))


class LeadingDecoder:
    """A decoder of which this rank has a part, and the others the rest."""

    def __init__(self, part: Decoder, shard: Shard, leader: Leader) -> None:
        self._part, self._shard, self._leader = part, shard, leader
        self._next_adapter = 1
        self._dropped: deque[int] = deque()

    def use_cache(self, kv: KvCache) -> None:
        """Computes over this cache from now on; the others take one as large."""
        self._leader.tell(ranks_pb2.RankCommand(use_cache=ranks_pb2.UseCache(num_blocks=kv.num_blocks)))
        self._part.use_cache(kv)

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Writes keys and values of all tokens, and returns float32 logits [S, vocab_size] of the sampled ones."""
        numbers: list[int] = []
        if inputs.adapters is not None:
            numbers = [adapter.number for adapter in inputs.adapters.adapters]
            keys, parts = tuple(map(str, numbers)), tuple(adapter.part for adapter in inputs.adapters.adapters)
            inputs = replace(inputs, adapters=replace(inputs.adapters, keys=keys, adapters=parts))
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        with self._leader.together(encode_forward(inputs, probe, numbers, dropped)):
            return self._part.forward(inputs, probe)

    def logits(self, last: Tensor) -> Tensor:
        """Float32 logits [N, vocab_size] of some rows of what a probe kept as `last`."""
        links = self._leader.links
        if links.ranks.tensor_size == 1:
            return self._part.logits(last)
        with self._leader.together(ranks_pb2.RankCommand(join_logits=ranks_pb2.JoinLogits(num_rows=len(last)))):
            rows = last.contiguous()
            links.share(rows)
            return self._part.logits(rows)

    def place_adapter(self, adapter: Adapter) -> GroupAdapter:
        """Gives every rank its part of a LoRA adapter. The others drop theirs some time after nobody has this one.

        Raises:
            InvalidArgumentError: It changes no layer.
        """
        if not adapter.layers:
            raise InvalidArgumentError("is no LoRA adapter", field="lora.name")
        number = self._next_adapter
        self._next_adapter += 1
        placed = GroupAdapter(number, self._part.place_adapter(adapter_part(adapter, self._shard)))
        for i, pairs in enumerate(adapter.layers, 1):
            self._leader.tell(encode_adapter_layer(number, pairs, is_last=i == len(adapter.layers)))
        weakref.finalize(placed, self._dropped.append, number).atexit = False
        return placed
