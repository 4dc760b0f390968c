"""Handles the scheduler's messages about adapters and tables of virtual tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_worker.batch.step import NewSequence, Step
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.cache import AdapterCache
from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError, UnavailableError
from protos import generation_pb2 as pb
from protos import worker_pb2

_BYTES_PER_ELEMENT = {pb.Tensor.DTYPE_FLOAT32: 4, pb.Tensor.DTYPE_FLOAT16: 2, pb.Tensor.DTYPE_BFLOAT16: 2}


class AdapterMessages:
    """The adapter messages of the scheduler link; all methods run in the link's thread."""

    def __init__(self, cache: AdapterCache[Any] | None, wake: Callable[[], None]) -> None:
        """Create the handler; tables are buffered until the step that uses them.

        Args:
            cache: The adapters; None while the worker sleeps, and gets neither adapters nor steps.
            wake: Called when an answer is ready.
        """
        self.answers: deque[worker_pb2.LoraResult] = deque()
        self._cache, self._wake = cache, wake
        self._tables: dict[str, list[pb.Tensor]] = {}

    def clear(self) -> None:
        """Drop all tables, since the epoch has ended."""
        self._tables.clear()

    def take(self, message: worker_pb2.SchedulerMessage, epoch: int) -> None:
        """Handle an adapter message of this epoch; ignore messages of other epochs."""
        if message.HasField("load_lora") and message.load_lora.epoch == epoch:
            self.load(message.load_lora)
        elif message.HasField("unload_lora") and message.unload_lora.epoch == epoch:
            self.unload(message.unload_lora)
        elif message.HasField("prompt_table") and message.prompt_table.epoch == epoch:
            self.keep(message.prompt_table)

    def load(self, message: worker_pb2.LoadLoraAdapter) -> None:
        """Start reading an adapter, and reply when reading has finished."""
        result = worker_pb2.LoraResult(name=message.name, epoch=message.epoch)
        if self._cache is None:
            result.error.CopyFrom(UnavailableError("the worker sleeps").to_proto())
            self.answers.append(result)
            return
        self._cache.load(message.path).add_done_callback(partial(self._answer, result))

    def unload(self, message: worker_pb2.UnloadLoraAdapter) -> None:
        if self._cache is not None:
            self._cache.unload(message.fingerprint)

    def keep(self, message: worker_pb2.PromptTablePart) -> None:
        """Buffer a part of a table for the next step."""
        self._tables.setdefault(message.key, []).append(message.tensor)

    def complete(self, step: Step) -> Step | None:
        """Return the step with its sequences' tables filled in, and start reading their adapters.

        Returns:
            None if a table is incomplete because a message was lost.
        """
        if not step.new_sequences:
            self._tables.clear()
            return step
        sequences: list[NewSequence] = []
        keys = {new.prompt_table_key for new in step.new_sequences if new.prompt_table_key}
        parts = {key: self._tables.get(key, []) for key in keys}
        self._tables.clear()
        if not all(some and some[-1].is_last for some in parts.values()):
            return None
        for new in step.new_sequences:
            for ref in (new.lora, new.prompt):
                if ref is not None and self._cache is not None:
                    self._cache.prefetch(ref)
            sequences.append(_with_table(new, parts[new.prompt_table_key]) if new.prompt_table_key else new)
        return replace(step, new_sequences=tuple(sequences))

    def _answer(self, result: worker_pb2.LoraResult, future: Future[Adapter]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None and self._cache is not None:
            adapter = future.result()
            result.rank, result.fingerprint = adapter.rank, adapter.fingerprint
            result.num_bytes = self._cache.size_of(adapter)
            result.num_virtual_tokens = 0 if adapter.prompt_table is None else len(adapter.prompt_table)
        else:
            known = error if isinstance(error, MidstreamError) else ExecutionError(str(error))
            result.error.CopyFrom(known.to_proto())
        self.answers.append(result)
        self._wake()


def _with_table(new: NewSequence, parts: list[pb.Tensor]) -> NewSequence:
    try:
        return replace(new, prompt_table=table_of(parts))
    except InvalidArgumentError as error:
        return replace(new, error=error)


def table_of(parts: list[pb.Tensor]) -> NDArray[np.float32]:
    """Return a table that was sent in parts, as float32 [num_virtual_tokens, hidden_size]. Raises InvalidArgumentError
    if the type, shape and size in bytes are inconsistent.
    """
    data = b"".join(part.data for part in parts)
    dtype, shape = parts[0].dtype, tuple(parts[0].shape)
    size = _BYTES_PER_ELEMENT.get(dtype)
    if size is None or len(shape) != 2 or len(data) != shape[0] * shape[1] * size:
        raise InvalidArgumentError(
            f"has {len(data)} bytes; does not match the shape {list(shape)}", field="prompt_tuning.table"
        )
    if dtype == pb.Tensor.DTYPE_BFLOAT16:
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    kind = "<f4" if dtype == pb.Tensor.DTYPE_FLOAT32 else "<f2"
    return np.frombuffer(data, dtype=kind).astype(np.float32).reshape(shape)
