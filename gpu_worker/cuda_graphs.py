"""Run a decoder on a GPU: one copy transfers the inputs, and decode-only steps replay CUDA graphs.

A step arrives as CPU tensors. If every sequence in it has one token and is sampled, its rows are laid out in one pinned
buffer as the graph of the next larger batch size expects them, copied to that graph's inputs, and the graph is
replayed; padding rows have no keys and write no slot. Each size has a second graph for steps with LoRA adapters, which
names them by slots on the device. Any other step is copied over and run eagerly. No call here waits
for the device, except to reuse a pinned buffer whose last copy is still running.

A step may be started before the host knows the tokens of the step before. These stay on the device (`feed`), and
negative token ids refer to them.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.staging import PinnedBuffers
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.arena import token_slots
from gpu_worker.models.decoder import Decoder, ForwardInputs, Probe

logger = logging.getLogger(__name__)

_NO_SLOT = -1
# Token id, position, KV slot, length and adapter slot of a row.
_WORDS = 5
_WARM_UP_RUNS = 2

Recorder = Callable[[Callable[[], object]], Callable[[], None]]
# Each set of graphs has its own recorder: the memory pool is freed with the last graph.
MakeRecorder = Callable[[], Recorder]


def graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to record, ascending: 1, 2, 4, 8, then multiples of 16, and the limit itself."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_batch_size]
    return [*sizes, *range(16, max_batch_size, 16), max_batch_size]


class GraphRecorder:
    """Record CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        """Record the kernels that `run` launches and return a function that replays them."""
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


def recorder_for(device: torch.device) -> MakeRecorder:
    """Return a factory of recorders for `device`; on a CPU, replaying runs the recorded function again."""
    return GraphRecorder if device.type == "cuda" else lambda: _run_again


def _run_again(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


class GraphDecoder:
    """A decoder on a device that takes CPU tensors; see the module docstring."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        max_blocks: int,
        make_recorder: MakeRecorder | None = None,
        takes_adapters: bool = False,
    ) -> None:
        """Wrap a decoder; record no graphs yet.

        Args:
            decoder: The decoder; takes inputs on `device`.
            device: The device it computes on.
            max_batch_size: Maximum sequences in one step.
            max_num_tokens: Maximum tokens in one step.
            max_blocks: Maximum blocks of one sequence.
            make_recorder: Factory of graph recorders; None: all steps run eagerly.
            takes_adapters: Whether to record graphs with LoRA adapters as well.
        """
        self._decoder, self._device, self._make_recorder = decoder, device, make_recorder
        self._max_batch_size = max_batch_size
        self._with_adapters = (False, True) if takes_adapters else (False,)
        # By number of rows, and whether they may have adapters.
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._logits = torch.empty(0, device=device)
        # Five numbers per row, then the used part of the block tables: filled by one copy.
        self._arena = torch.zeros(max_batch_size * (_WORDS + max_blocks), dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int32, device=device)
        self._counts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        # Sampled tokens of the previous step, which may not be known to the host yet.
        self._fed = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        most_eager = 4 * max_num_tokens + max_batch_size * (3 + max_blocks) + 1
        self._pinned = PinnedBuffers(device, max(most_eager, self._arena.numel()))

    def place_adapter(self, adapter: Adapter) -> object:
        """Copy a LoRA adapter to the device."""
        return self._decoder.place_adapter(adapter)

    def use_cache(self, kv: KvCache) -> None:
        """Use this cache from now on; drop graphs recorded over another."""
        self.clear()
        self._decoder.use_cache(kv)

    def clear(self) -> None:
        """Drop all graphs: steps run eagerly until the next `capture`."""
        self._graphs.clear()
        self._logits = torch.empty(0, device=self._device)

    def close(self) -> None:
        """Destroy all graphs, and wait until the device is done with them.

        NCCL waits for the graphs that hold its operations before it ends a communicator, so call this before.
        """
        self.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def feed(self, tokens: Tensor) -> None:
        """Store the int32 tokens that a step sampled; in the next step, id -1 - i refers to tokens[i]."""
        torch.clamp(tokens, min=0, out=self._fed[: len(tokens)])

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the graphs over the current cache, largest first, so that the smaller ones fit in its memory."""
        if self._make_recorder is None:
            return
        self.clear()
        record = self._make_recorder()
        started = time.perf_counter()
        for size in reversed(graph_sizes(self._max_batch_size)):
            for has_adapters in self._with_adapters:
                inputs = self._static_inputs(size, has_adapters=has_adapters)
                # Earlier steps may have left data there in the layout of another batch size.
                self._arena.zero_()
                inputs.slot_mapping.fill_(_NO_SLOT)
                if inputs.adapter_slots is not None:
                    inputs.adapter_slots.fill_(_NO_SLOT)
                if not self._graphs:
                    self._logits = self._decoder.forward(inputs)
                self._graphs[size, has_adapters] = record(functools.partial(self._run, inputs, size))
        logger.info("recorded %d graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Return float32 logits [S, vocab_size] on the device, valid until the next call."""
        if probe is not None:
            return self._decoder.forward(self._send_all(inputs), probe)
        num_rows = inputs.context_lens.shape[0]
        has_adapters = inputs.adapters is not None
        is_decode = inputs.virtual is None and inputs.token_ids.shape[0] == inputs.sampled.shape[0] == num_rows
        sizes = [size for size, takes in self._graphs if takes == has_adapters and size >= num_rows]
        if not is_decode or not sizes:
            return self._decoder.forward(self._send_all(inputs))
        size = min(sizes)
        self._fill(inputs, size)
        self._graphs[size, has_adapters]()
        return self._logits[:num_rows]

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits of the hidden states that a probe kept."""
        return self._decoder.logits(last)

    def _run(self, inputs: ForwardInputs, size: int) -> None:
        # All graphs write their logits to one shared buffer, which can be larger than the rest of their memory.
        self._logits[:size] = self._decoder.forward(replace(inputs, token_ids=self._known(inputs.token_ids)))

    def _known(self, token_ids: Tensor) -> Tensor:
        """Return token ids with placeholders replaced by the tokens passed to `feed`."""
        return torch.where(token_ids < 0, self._fed[(-1 - token_ids).clamp(min=0).long()], token_ids)

    def _static_inputs(self, size: int, *, has_adapters: bool) -> ForwardInputs:
        token_ids, positions, slots, lens, adapter_slots = self._arena[: _WORDS * size].view(_WORDS, size).unbind()
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            query_starts=self._counts[: size + 1],
            context_lens=lens,
            block_tables=self._tables[:size],
            sampled=self._counts[:size],
            adapter_slots=adapter_slots if has_adapters else None,
        )

    def _fill(self, inputs: ForwardInputs, size: int) -> None:
        num_rows, num_blocks = inputs.block_tables.shape
        start = _WORDS * size
        used = start + num_rows * num_blocks
        buffer = self._pinned.next()[:used]
        values = buffer.numpy()
        parts = [
            part.numpy() for part in (inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens)
        ]
        none = np.full(num_rows, _NO_SLOT, dtype=np.int32)
        parts.append(none if inputs.adapters is None else token_slots(inputs.adapters))
        paddings = (0, 0, _NO_SLOT, 0, _NO_SLOT)
        for head, part, padding in zip(values[:start].reshape(_WORDS, size), parts, paddings, strict=True):
            head[:num_rows] = part
            head[num_rows:] = padding
        values[start:] = inputs.block_tables.numpy().reshape(-1)
        self._pinned.send(buffer, self._arena[:used])
        # Entries past a row's last block are never read.
        tables = self._arena[start:used].view(num_rows, num_blocks)
        self._tables[:num_rows, :num_blocks].copy_(tables, non_blocking=True)

    def _send_all(self, inputs: ForwardInputs) -> ForwardInputs:
        others = ("adapters", "virtual", "adapter_slots")
        names = [field.name for field in fields(ForwardInputs) if field.name not in others]
        arrays = [getattr(inputs, name).numpy() for name in names]
        if inputs.adapters is not None:
            names.append("adapter_slots")
            arrays.append(token_slots(inputs.adapters))
        parts = self._pinned.send_arrays(arrays)
        sent = replace(inputs, adapters=None, **dict(zip(names, parts, strict=True)))  # type: ignore[arg-type]
        return replace(sent, token_ids=self._known(sent.token_ids)) if bool((inputs.token_ids < 0).any()) else sent
