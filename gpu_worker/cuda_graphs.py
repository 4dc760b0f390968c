"""Runs a decoder on a GPU: one copy transfers the inputs, and steps replay CUDA graphs.

A step arrives as CPU tensors. It is written to one pinned buffer in the layout of the smallest recorded shape that
fits, copied to that graph's inputs, and the graph is replayed. There are shapes for decode steps, in which every
sequence has one token and is sampled, and for mixed steps of up to 512 tokens, which combine prompts with decodes or
verify drafts. Padding sequences have no tokens or, in a decode step, one token without keys; they write no KV slot.
Each shape has a second graph for steps with LoRA adapters, which are identified by their slots on the device, and in
models with experts a third one for adapters of experts. Larger steps, which take the device longer to compute than the
host to launch, are copied to the device and run eagerly. So are all steps of a model that uses the transformers
implementation, if this implementation reads anything back from the device. No call here waits for the device, except to
reuse a pinned buffer whose last copy is still in progress.

A step may be started before the host knows the tokens of the previous step. These stay on the device (`feed`), and
negative token ids refer to them; with several ranks, rank 0 broadcasts them to the other ranks that embed tokens, as
the first operation of every graph and of each eager step that needs them. A graph ends by storing the most likely
tokens for the next step (`feed`). If rows have a temperature, a second graph draws tokens from the logits, and stores
those instead.

Block tables stay on the device as well. A step carries the entries that have changed since the previous step, at most
one per sequence of its shape; if more have changed, the tables are sent whole.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import kernels
from gpu_worker.batch.staging import PinnedBuffers
from gpu_worker.batch.step import EMPTY, IntArray
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.arena import adapter_use, token_slots
from gpu_worker.lora.inputs import AdapterUse
from gpu_worker.models.decoder import Decoder, ForwardInputs, Probe
from gpu_worker.sampling.distribution import greedy_tokens
from gpu_worker.sampling.draws import DrawParams, RecordedDraws

logger = logging.getLogger(__name__)

_NO_SLOT = -1
# Mixed steps are recorded for these numbers of tokens, and for these numbers of sequences and the maximum batch size.
_MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512)
_MIXED_ROWS = (8, 64)

Recorder = Callable[[Callable[[], object]], Callable[[], None]]
# Each set of graphs has its own recorder, because the memory pool is freed with its last graph.
MakeRecorder = Callable[[], Recorder]


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to record, in ascending order: 1, 2, 4, 8, then multiples of 16, and the limit itself."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_batch_size]
    return [*sizes, *range(16, max_batch_size, 16), max_batch_size]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Shape of a recorded step.

    Attributes:
        num_rows: Number of sequences, and of sampled tokens.
        num_tokens: Number of tokens; equal to num_rows in a decode step, larger in a mixed one.
    """

    num_rows: int
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Return whether every sequence has one token."""
        return self.num_tokens == self.num_rows

    def sizes(self) -> list[int]:
        """Return the number of elements of each of a step's inputs.

        The inputs are token ids, positions, KV slots and adapter slots; lengths and sampled tokens; indices and values
        of the block-table entries that have changed; and query starts.
        """
        return [self.num_tokens] * 4 + [self.num_rows] * 4 + [self.num_rows + 1]

    def takes(self, num_tokens: int, num_rows: int, num_sampled: int) -> bool:
        """Return whether a step with these numbers of tokens, sequences and sampled tokens fits this shape."""
        if self.is_decode and not num_tokens == num_rows == num_sampled:
            return False
        return num_tokens <= self.num_tokens and max(num_rows, num_sampled) <= self.num_rows


def mixed_shapes(max_batch_size: int, max_num_tokens: int) -> list[Shape]:
    """Return the shapes of mixed steps to record. For each number of tokens, there are several numbers of sequences up
    to the largest possible one, so that a step with many sequences is not padded to more tokens.
    """
    rows, tokens = (*_MIXED_ROWS, max_batch_size), [size for size in _MIXED_TOKENS if size <= max_num_tokens]
    return [
        Shape(num_rows, num_tokens)
        for num_tokens in tokens
        for num_rows in sorted({min(size, max_batch_size, num_tokens - 1) for size in rows})
    ]


def _counts(inputs: ForwardInputs) -> tuple[int, int, int]:
    """Return the numbers of tokens, sequences and sampled tokens in a step."""
    return inputs.token_ids.shape[0], inputs.context_lens.shape[0], inputs.sampled.shape[0]


class GraphRecorder:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record the kernels that `run` launches and return a function that replays them."""
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                run()
                with _waits_raise():
                    run()
        finally:
            # Wait even if `run` has raised an exception: its kernels may still write to memory that is freed next.
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    """Raise RuntimeError if the host would wait for the device, which cannot be recorded.

    A failed recording leaves more state behind than a failed run.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch calls this mode a prototype, because it does not notice every wait.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _NumbersOnDevice(TorchFunctionMode):
    """While this mode is active, `torch.tensor` copies each number to a device only once; later calls copy that tensor.

    Some models of transformers create constants in each step. Copies from host memory cannot be recorded, unless the
    memory is pinned. The tensors must outlive the graphs that read them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not torch.tensor or not args or not isinstance(args[0], int | float):
            return function(*args, **kwargs)
        key = repr((args, kwargs))
        if key not in self._made:
            self._made[key] = function(*args, **kwargs)
        return self._made[key].clone()


def _wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorder_for(device: torch.device) -> MakeRecorder:
    """Return a factory of recorders for `device`; on a CPU, a replay runs the recorded function again."""
    return GraphRecorder if device.type == "cuda" else lambda: _run_again


def _run_again(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


class GraphDecoder:
    """Wraps a decoder on a device, and takes its inputs as CPU tensors; see the module's docstring.

    Attributes:
        adapts_experts: Whether LoRA adapters of experts are supported.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        max_blocks: int,
        make_recorder: MakeRecorder | None = None,
        may_fail: bool = False,
        takes_adapters: bool = False,
        adapts_experts: bool = False,
        draws: bool = False,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Wrap a decoder; record no graphs yet.

        Args:
            make_recorder: Factory of graph recorders; None means that all steps run eagerly.
            may_fail: Whether to run all steps eagerly if they cannot be recorded, instead of raising the error.
            adapts_experts: Whether LoRA adapters of experts are supported, which get their own graphs.
            share: Broadcasts a tensor from rank 0, which samples, to the other ranks that embed tokens; None if there
                are none.
        """
        self._decoder, self._device, self._make_recorder = decoder, device, make_recorder
        self._share = share
        self._may_fail = may_fail
        self.adapts_experts = adapts_experts
        self._uses = [AdapterUse.NOTHING]
        if takes_adapters:
            self._uses.append(AdapterUse.LINEAR_LAYERS)
        if takes_adapters and adapts_experts:
            self._uses.append(AdapterUse.EXPERTS)
        # Shapes in ascending order, so that the first one that fits a step is the smallest; those of decode steps come
        # first.
        self._shapes = [Shape(size, size) for size in graph_sizes(max_batch_size)]
        self._shapes += mixed_shapes(max_batch_size, max_num_tokens)
        self._numbers = _NumbersOnDevice()
        # Graphs by shape and by the matrices that adapters may change.
        self._graphs: dict[tuple[Shape, AdapterUse], Callable[[], None]] = {}
        self._logits = torch.empty(0, device=device)
        # The inputs of a step and, if the block tables are sent whole, their used part, which one copy transfers.
        most = max(sum(shape.sizes()) + shape.num_rows * max_blocks for shape in self._shapes)
        self._arena = torch.zeros(most, dtype=torch.int32, device=device)
        # The last element is a dummy, to which the padding of a step's list of changed entries is written.
        self._entries = torch.zeros(max_batch_size * max_blocks + 1, dtype=torch.int32, device=device)
        self._tables = self._entries[:-1].view(max_batch_size, max_blocks)
        # The device's block tables after all steps launched so far have run.
        self._known_tables = np.zeros((max_batch_size, max_blocks), dtype=np.int32)
        # The most likely tokens of the last replay; -1 if the logits are not finite.
        self._best = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._has_best = False
        # The sampled tokens of the previous step, which the host may not know yet.
        self._fed = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._draws = RecordedDraws(device, graph_sizes(max_batch_size)) if draws else None
        # Up to five numbers per token: its id, position, KV slot and adapter slot, and its index in `sampled`, since
        # with drafts every token may be sampled.
        most_eager = 5 * max_num_tokens + max_batch_size * (2 + max_blocks) + 1
        self._pinned = PinnedBuffers(device, max(most_eager, self._arena.numel()))

    def place_adapter(self, adapter: Adapter) -> object:
        """Copy a LoRA adapter to the device."""
        return self._decoder.place_adapter(adapter)

    def use_cache(self, kv: KvCache) -> None:
        """Use this cache from now on; drop graphs that were recorded over another cache."""
        self.clear()
        self._decoder.use_cache(kv)

    def clear(self) -> None:
        """Drop all graphs, so that steps run eagerly until the next `capture`."""
        self._graphs.clear()
        if self._draws is not None:
            self._draws.clear()
        self._logits = torch.empty(0, device=self._device)

    def close(self) -> None:
        """Destroy all graphs, and wait until the device has finished using them.

        NCCL ends a communicator only when no graph holds its operations any more, so call this first.
        """
        self.clear()
        gc.collect()
        _wait_for(self._device)

    def feed(self, tokens: Tensor) -> None:
        """Store the int32 tokens that a step sampled; in the next step, the token id -1 - i refers to tokens[i]."""
        torch.clamp(tokens, min=0, out=self._fed[: len(tokens)])

    def best(self, num_rows: int) -> Tensor | None:
        """Return the most likely token of each row of the last `forward`, which `feed` has already stored for the next
        step; None if no graph was replayed.
        """
        return self._best[:num_rows] if self._has_best else None

    @torch.inference_mode()
    def draw(self, params: DrawParams) -> Tensor | None:
        """Return the tokens drawn from the last `forward`, which `feed` has already stored for the next step; None if
        no graph was replayed, or if draws are not recorded.
        """
        return self._draws.draw(params) if self._draws is not None and self._has_best else None

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the graphs over the current cache, largest first, so that the smaller ones fit into its memory."""
        if self._make_recorder is None:
            return
        self.clear()
        started = time.perf_counter()
        try:
            self._record(self._make_recorder())
        except RuntimeError as error:
            if not self._may_fail:
                raise
            self.clear()
            self._make_recorder = None
            reason = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("steps run without CUDA graphs, because they cannot be recorded: %s", reason[0])
            return
        logger.info("recorded %d graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    def _record(self, record: Recorder) -> None:
        for shape in sorted(self._shapes, reverse=True):
            for use in self._uses:
                inputs, changes = self._static_inputs(shape, use)
                # The buffer may contain the inputs of earlier steps in another layout.
                self._arena.zero_()
                inputs.slot_mapping.fill_(_NO_SLOT)
                if inputs.adapter_slots is not None:
                    inputs.adapter_slots.fill_(_NO_SLOT)
                if shape.is_decode:
                    torch.arange(shape.num_rows + 1, dtype=torch.int32, out=inputs.query_starts)
                if not self._graphs:
                    self._logits = self._decoder.forward(inputs)
                run = functools.partial(self._run, inputs, changes, shape.num_rows)
                self._graphs[shape, use] = record(run)
        # Recording ran forward passes that wrote to the first entry.
        self._entries.zero_()
        self._known_tables.fill(0)
        if self._draws is not None and kernels.can_sample(self._logits):
            self._draws.capture(record, self._logits, self._best, self.feed)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Return float32 logits [S, vocab_size] on the device, valid until the next call."""
        use = adapter_use(inputs.adapters)
        shape = None if probe is not None or inputs.virtual is not None else self._shape_for(inputs, use)
        self._has_best = shape is not None
        if shape is None:
            return self._decoder.forward(self._send_all(inputs, use), probe)
        self._fill(inputs, shape)
        self._graphs[shape, use]()
        return self._logits[: inputs.sampled.shape[0]]

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits of the hidden states that a probe kept."""
        return self._decoder.logits(last)

    def _shape_for(self, inputs: ForwardInputs, use: AdapterUse) -> Shape | None:
        """Return the smallest recorded shape that fits a step; None if there is none."""
        counts = _counts(inputs)
        found = next((shape for shape in self._shapes if shape.takes(*counts)), None)
        return found if found is not None and (found, use) in self._graphs else None

    def _run(self, inputs: ForwardInputs, changes: tuple[Tensor, Tensor], num_rows: int) -> None:
        self._entries.scatter_(0, changes[0].long(), changes[1])
        # All graphs write their logits to one shared buffer, which may be larger than the rest of their memory.
        with self._numbers:
            logits = self._decoder.forward(replace(inputs, token_ids=self._known(inputs.token_ids)))
        self._logits[:num_rows] = logits
        # Ranks other than the first have no logits.
        if logits.shape[1]:
            self._best[:num_rows] = greedy_tokens(logits)
            self.feed(self._best[:num_rows])

    def _known(self, token_ids: Tensor) -> Tensor:
        """Return the token ids with placeholders replaced by the tokens that the sampling rank passed to `feed`."""
        if self._share is not None:
            self._share(self._fed)
        return torch.where(token_ids < 0, self._fed[(-1 - token_ids).clamp(min=0).long()], token_ids)

    def _static_inputs(self, shape: Shape, use: AdapterUse) -> tuple[ForwardInputs, tuple[Tensor, Tensor]]:
        """Return views of the static buffer for a step of this shape: its inputs, and the indices and values of the
        changed entries of the block tables.
        """
        parts = torch.split(self._arena[: sum(shape.sizes())], shape.sizes())
        token_ids, positions, slots, adapter_slots, lens, sampled, places, values, starts = parts
        inputs = ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            query_starts=starts,
            context_lens=lens,
            block_tables=self._tables[: shape.num_rows],
            sampled=sampled,
            adapter_slots=None if use is AdapterUse.NOTHING else adapter_slots,
            adapter_use=use,
            max_queries=1 if shape.is_decode else shape.num_tokens,
        )
        return inputs, (places, values)

    def _changes(self, tables: IntArray, limit: int) -> tuple[IntArray, IntArray] | None:
        """Return indices and values of entries that differ from the device's; None if there are more than `limit`."""
        num_rows, num_blocks = tables.shape
        known = self._known_tables[:num_rows, :num_blocks]
        rows, columns = np.nonzero(known != tables)
        values = tables[rows, columns]
        known[rows, columns] = values
        if len(rows) > limit:
            return None
        return (rows * self._known_tables.shape[1] + columns).astype(np.int32), values

    def _fill(self, inputs: ForwardInputs, shape: Shape) -> None:
        num_tokens, num_rows, _ = _counts(inputs)
        tables = inputs.block_tables.numpy()
        changes = self._changes(tables, shape.num_rows)
        start = sum(shape.sizes())
        used = start + (tables.size if changes is None else 0)
        buffer = self._pinned.next()[:used]
        values = buffer.numpy()
        none = np.full(num_tokens, _NO_SLOT, dtype=np.int32)
        places, entries = changes or (EMPTY, EMPTY)
        parts = (
            (inputs.token_ids.numpy(), 0),
            (inputs.positions.numpy(), 0),
            (inputs.slot_mapping.numpy(), _NO_SLOT),
            (none if inputs.adapters is None else token_slots(inputs.adapters), _NO_SLOT),
            (inputs.context_lens.numpy(), 0),
            (inputs.sampled.numpy(), 0),
            (places, len(self._entries) - 1),
            (entries, 0),
            # Padding sequences have no tokens or, in a decode step, one token without keys.
            (
                inputs.query_starts.numpy(),
                np.arange(num_rows + 1, shape.num_rows + 1) if shape.is_decode else num_tokens,
            ),
        )
        heads = np.split(values[:start], np.cumsum(shape.sizes())[:-1])
        for head, (part, padding) in zip(heads, parts, strict=True):
            head[: len(part)] = part
            head[len(part) :] = padding
        values[start:] = tables.reshape(-1)[: used - start]
        self._pinned.send(buffer, self._arena[:used])
        if changes is None:
            whole = self._arena[start:used].view(tables.shape)
            self._tables[: tables.shape[0], : tables.shape[1]].copy_(whole, non_blocking=True)

    def _send_all(self, inputs: ForwardInputs, use: AdapterUse) -> ForwardInputs:
        others = ("adapters", "virtual", "adapter_slots", "adapter_use", "max_queries")
        names = [field.name for field in fields(ForwardInputs) if field.name not in others]
        arrays = [getattr(inputs, name).numpy() for name in names]
        if inputs.adapters is not None:
            names.append("adapter_slots")
            arrays.append(token_slots(inputs.adapters))
        parts = self._pinned.send_arrays(arrays)
        sent = replace(inputs, adapters=None, adapter_use=use, **dict(zip(names, parts, strict=True)))  # type: ignore[arg-type]
        return replace(sent, token_ids=self._known(sent.token_ids)) if bool((inputs.token_ids < 0).any()) else sent
