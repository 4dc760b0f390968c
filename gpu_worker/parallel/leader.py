"""Rank 0's decoder: tells the other ranks what to compute, then computes its own part.

Everything above the decoder (rows, sampling, grammars, drafts, beams) runs only on rank 0 and is not affected by the
other ranks.
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
from gpu_worker.parallel.commands import encode_adapter_layer, encode_forward, encode_post_process
from gpu_worker.parallel.communicator import RankCommunicator
from gpu_worker.parallel.frames import FrameSender
from gpu_worker.parallel.pipeline import PipelineDecoder
from gpu_worker.parallel.shard import Shard
from gpu_worker.parallel.shard_adapters import adapter_part
from gpu_worker.sampling.post_processors import Call
from midstream.errors import InvalidArgumentError
from protos import ranks_pb2


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GroupAdapter:
    """The number of an adapter that is sharded over all ranks."""

    number: int
    part: object


class Leader:
    """The other ranks, as seen by the model runner and the decoder.

    Attributes:
        has_failed: Whether the ranks' states may have diverged because a joint operation failed.
    """

    def __init__(self, sender: FrameSender, communicator: RankCommunicator) -> None:
        self.has_failed = False
        self.communicator = communicator
        self._sender = sender

    def tell(self, command: ranks_pb2.RankCommand) -> None:
        """Send a command to all other ranks."""
        self._sender.send(command.SerializeToString())

    @contextmanager
    def together(self, command: ranks_pb2.RankCommand) -> Iterator[None]:
        """Send a command to all other ranks; the body of the context executes the same command on this rank."""
        with self.guarded():
            self.tell(command)
            yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Set `has_failed` if the body of the context fails, because other ranks may then wait forever."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    def lead(self, part: Decoder, shard: Shard) -> LeadingDecoder:
        """Return a decoder for the whole model, given the decoder for this rank's part."""
        return LeadingDecoder(part, shard, self)

    def least_num_blocks(self, num_blocks: int) -> int:
        """Return the smallest KV block capacity of all ranks, given this rank's."""
        with self.together(ranks_pb2.RankCommand(choose_num_blocks=ranks_pb2.ChooseNumBlocks())):
            return self.communicator.least(num_blocks)

    def copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks on all other ranks."""
        copy = ranks_pb2.CopyBlocks(sources=sources.tolist(), targets=targets.tolist())
        self.tell(ranks_pb2.RankCommand(copy_blocks=copy))

    def post_process(self, call: Call, logits: Tensor) -> None:
        """Make the other tensor ranks of the first stage call a post-processor with these arguments."""
        if self.communicator.ranks.tensor_size > 1:
            with self.together(encode_post_process(call)):
                self.communicator.share(logits.contiguous())

    def record_graphs(self, record: Callable[[], None]) -> None:
        """Record CUDA graphs on all ranks at the same time."""
        with self.together(ranks_pb2.RankCommand(record_graphs=ranks_pb2.RecordGraphs())):
            record()

    def stop(self, exit_code: int) -> None:
        self.tell(ranks_pb2.RankCommand(stop=ranks_pb2.StopRank(exit_code=exit_code)))


class LeadingDecoder:
    """A decoder that combines this rank's part with the parts of the other ranks."""

    def __init__(self, part: Decoder, shard: Shard, leader: Leader) -> None:
        self._part, self._shard, self._leader = part, shard, leader
        self._next_adapter = 1
        self._dropped: deque[int] = deque()

    def use_cache(self, kv: KvCache) -> None:
        """Use this cache from now on; the other ranks allocate caches with as many blocks."""
        self._leader.tell(ranks_pb2.RankCommand(use_cache=ranks_pb2.UseCache(num_blocks=kv.num_blocks)))
        self._part.use_cache(kv)

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Write the keys and values of all tokens; return float32 logits [S, vocab_size] of the sampled tokens."""
        inputs, numbers = self._parts_of(inputs)
        with self._leader.together(encode_forward(inputs, probe, numbers, self._take_dropped())):
            return self._part.forward(inputs, probe)

    def _parts_of(self, inputs: ForwardInputs) -> tuple[ForwardInputs, list[int]]:
        """Return the inputs with this rank's parts of the adapters, and the numbers of the adapters."""
        if inputs.adapters is None:
            return inputs, []
        numbers = [adapter.number for adapter in inputs.adapters.adapters]
        keys, parts = tuple(map(str, numbers)), tuple(adapter.part for adapter in inputs.adapters.adapters)
        return replace(inputs, adapters=replace(inputs.adapters, keys=keys, adapters=parts)), numbers

    def _take_dropped(self) -> list[int]:
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def begin(self, inputs: ForwardInputs, probe: Probe | None = None) -> None:
        """Begin a pass of a group with several stages; `end` completes the oldest one."""
        assert isinstance(self._part, PipelineDecoder)
        inputs, numbers = self._parts_of(inputs)
        with self._leader.together(encode_forward(inputs, probe, numbers, self._take_dropped(), is_open=True)):
            self._part.begin(inputs, probe)

    def end(self) -> Tensor:
        """Wait for the oldest pass that has begun; return float32 logits [S, vocab_size] of the sampled tokens."""
        assert isinstance(self._part, PipelineDecoder)
        if self._leader.communicator.ranks.tensor_size == 1:
            with self._leader.guarded():
                return self._part.end()
        with self._leader.together(ranks_pb2.RankCommand(end_pass=ranks_pb2.EndPass())):
            return self._part.end()

    def end_all(self) -> None:
        """Wait for all passes that have begun, and drop their results."""
        assert isinstance(self._part, PipelineDecoder)
        while self._part.num_open:
            self.end()

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [N, vocab_size] for some rows of the hidden states that a probe kept as `last`."""
        communicator = self._leader.communicator
        if communicator.ranks.tensor_size == 1:
            return self._part.logits(last)
        with self._leader.together(ranks_pb2.RankCommand(join_logits=ranks_pb2.JoinLogits(num_rows=len(last)))):
            rows = last.contiguous()
            communicator.share(rows)
            return self._part.logits(rows)

    def place_adapter(self, adapter: Adapter) -> GroupAdapter:
        """Send every rank its part of a LoRA adapter. The other ranks drop their parts once rank 0 no longer uses the
        adapter. Raises InvalidArgumentError if the adapter changes no layer.
        """
        if not adapter.layers:
            raise InvalidArgumentError("is not a LoRA adapter", field="lora.name")
        number = self._next_adapter
        self._next_adapter += 1
        placed = GroupAdapter(number, self._part.place_adapter(adapter_part(adapter, self._shard)))
        for i, pairs in enumerate(adapter.layers, 1):
            self._leader.tell(encode_adapter_layer(number, pairs, is_last=i == len(adapter.layers)))
        weakref.finalize(placed, self._dropped.append, number).atexit = False
        return placed
