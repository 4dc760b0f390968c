"""Logits post-processors: user code that changes logits and that a request selects by name.

A package registers a post-processor in the entry point group `midstream.logits_post_processors`, or the setting
`logits_post_processors` names it. It is a class with a constructor without arguments, derived from LogitsPostProcessor,
or from BatchedLogitsPostProcessor, which is called once for all its sequences in a step. It receives the model's
unmodified logits. Its results must depend only on its arguments, since a sequence is recomputed after its worker is
lost. In a group of ranks it runs on rank 0, which samples for all. With `replicate_post_processors` all tensor ranks of
the first stage call it with the same arguments, each in its own process, in the same order; the result of rank 0's call
is used.

If a post-processor raises an exception, or returns anything other than float32 logits of the same shape, the request
for which it was called fails.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from multiprocessing.connection import Client, Connection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import IntArray, Step
from gpu_worker.sampling.distribution import bounded
from midstream.errors import ConfigError, ExecutionError, InvalidArgumentError, MidstreamError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "midstream.logits_post_processors"


class LogitsPostProcessor(ABC):
    """Changes the logits of one sequence."""

    @abstractmethod
    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """Return the new logits.

        Args:
            logits: Float32 [vocab_size]; may be changed and returned.
            tokens: Prompt and output so far, int32 [num_tokens]; must not be changed.
            client_id: The request's client id; requests may share it.
            request_id: The request's id, shared by its sequences.
        """


class BatchedLogitsPostProcessor(ABC):
    """Changes the logits of all sequences that use it in a step with one call."""

    @abstractmethod
    def process(
        self, logits: Tensor, tokens: Sequence[NDArray[np.int32]], client_ids: Sequence[str], request_ids: Sequence[str]
    ) -> Tensor:
        """Return the new logits, as LogitsPostProcessor.process does, but for logits [num_sequences, vocab_size]. No
        row may depend on other rows.

        If it fails, it is called again for each sequence alone, to find the one that fails.
        """


class ClientPostProcessor(BatchedLogitsPostProcessor):
    """A function of the process that has started this worker: each call goes to its socket (see
    midstream/executor/post_processor_server.py).
    """

    def __init__(self, name: str, socket: str) -> None:
        """Store the function's name and the path of the socket, to which the first call connects."""
        self._name, self._socket = name, socket
        self._connection: Connection | None = None

    def process(
        self, logits: Tensor, tokens: Sequence[NDArray[np.int32]], client_ids: Sequence[str], request_ids: Sequence[str]
    ) -> Tensor:
        """Return the function's logits.

        Raises:
            ExecutionError: The function raised an exception.
            OSError: The process does not exist any more.
        """
        header = {
            "name": self._name,
            "request_ids": list(request_ids),
            "tokens": [known.tolist() for known in tokens],
            "shape": list(logits.shape),
        }
        if self._connection is None:
            self._connection = Client(self._socket, "AF_UNIX")
        try:
            self._connection.send_bytes(json.dumps(header).encode())
            self._connection.send_bytes(logits.cpu().numpy().tobytes())
            error = json.loads(self._connection.recv_bytes())["error"]
            changed = b"" if error else self._connection.recv_bytes()
        except (OSError, EOFError):
            self._connection = None
            raise
        if error:
            raise ExecutionError(error)
        return torch.frombuffer(bytearray(changed), dtype=torch.float32).reshape(logits.shape).to(logits.device)


PostProcessor = LogitsPostProcessor | BatchedLogitsPostProcessor


def refuse_unknown(step: Step, known: Collection[str]) -> Step:
    """Fail sequences that name a post-processor which is not installed on this worker."""
    if all(not new.post_processor or new.post_processor in known for new in step.new_sequences):
        return step
    error = InvalidArgumentError("is not installed on this worker", field="logits_post_processor_name")
    news = (
        new if not new.post_processor or new.post_processor in known else replace(new, error=error)
        for new in step.new_sequences
    )
    return replace(step, new_sequences=tuple(news))


def load_post_processors(named: str = "") -> dict[str, PostProcessor]:
    """Return the post-processors of all installed packages and of the setting, by name.

    Args:
        named: Comma-separated entries `NAME=module:Class`, which override others of the same name; or
            `NAME=unix:PATH`, a function of the process that serves this socket.

    Raises:
        ConfigError: A post-processor cannot be loaded, or its class is not derived from one of the base classes.
    """
    offered = {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    functions: dict[str, PostProcessor] = {}
    for item in filter(None, named.split(",")):
        name, _, place = item.partition("=")
        if not name or ":" not in place:
            raise ConfigError(f"{item!r} is not NAME=module:Class", field="logits_post_processors")
        kind, _, path = place.partition(":")
        if kind == "unix":
            functions[name] = ClientPostProcessor(name, path)
        else:
            offered[name] = EntryPoint(name, place, ENTRY_POINT_GROUP)
    return {name: _load(entry_point) for name, entry_point in offered.items()} | functions


def _load(entry_point: EntryPoint) -> PostProcessor:
    try:
        processor = entry_point.load()()
    except Exception as error:
        raise ConfigError(f"{entry_point.name!r} under {ENTRY_POINT_GROUP} does not load: {error}") from error
    if not isinstance(processor, LogitsPostProcessor | BatchedLogitsPostProcessor):
        kind = type(processor).__name__
        raise ConfigError(f"{entry_point.name!r} under {ENTRY_POINT_GROUP} is a {kind}, not a post-processor")
    return processor


@dataclass(frozen=True, slots=True)
class Call:
    """The sequences of a step that use one post-processor, with its arguments for each of them."""

    name: str
    tokens: Sequence[NDArray[np.int32]]
    client_ids: Sequence[str]
    request_ids: Sequence[str]


# Repeats a call, with a copy of its logits, on other ranks.
Replicate = Callable[[Call, Tensor], None]


def post_process(
    logits: Tensor,
    state: Rows,
    rows: IntArray,
    places: list[int],
    processors: Mapping[str, PostProcessor],
    replicate: Replicate | None = None,
) -> dict[int, MidstreamError]:
    """Change `logits` [len(rows), vocab_size] at `places` in place; return errors by place."""
    by_name: dict[str, list[int]] = {}
    for place in places:
        by_name.setdefault(state.post_processors[rows[place]][0], []).append(place)
    errors: dict[int, MidstreamError] = {}
    for name, group in by_name.items():
        call, given = _call(name, state, rows, group), logits[group]
        if replicate is not None:
            replicate(call, given)
        found = apply(processors[name], call, given)
        logits[group] = given
        errors |= {group[index]: error for index, error in found.items()}
    return errors


def apply(processor: PostProcessor, call: Call, logits: Tensor) -> dict[int, MidstreamError]:
    """Change `logits` [sequences of the call, vocab_size] in place; return errors by index."""
    if isinstance(processor, BatchedLogitsPostProcessor) and _try_all(processor, call, logits):
        return {}
    errors: dict[int, MidstreamError] = {}
    for index in range(len(logits)):
        error = _process_one(processor, call, logits, index)
        if error is not None:
            errors[index] = error
    return errors


def _try_all(processor: BatchedLogitsPostProcessor, call: Call, logits: Tensor) -> bool:
    given = logits.clone()
    try:
        changed = _checked(processor.process(given, call.tokens, call.client_ids, call.request_ids), given)
    except Exception:  # noqa: BLE001 (user code)
        return False
    logits.copy_(changed)
    return True


def _process_one(processor: PostProcessor, call: Call, logits: Tensor, index: int) -> MidstreamError | None:
    given = logits[[index]]
    tokens, client_id, request_id = call.tokens[index], call.client_ids[index], call.request_ids[index]
    try:
        if isinstance(processor, LogitsPostProcessor):
            changed = _checked(processor.process(given[0], tokens, client_id, request_id), given[0])[None]
        else:
            changed = _checked(processor.process(given, [tokens], [client_id], [request_id]), given)
    except Exception as error:  # noqa: BLE001 (user code)
        logger.warning("the logits post-processor %s failed: %r", call.name, error)
        message = f"the logits post-processor {call.name!r} failed: {type(error).__name__}: {error}"
        return ExecutionError(message[:500], field="logits_post_processor_name")
    logits[index] = changed[0]
    return None


def _call(name: str, state: Rows, rows: IntArray, places: list[int]) -> Call:
    tokens = []
    for place in places:
        known = state.tokens[rows[place], : state.lengths[rows[place]]]
        known.flags.writeable = False  # only this view is read-only
        tokens.append(known)
    _, client_ids, request_ids = zip(*(state.post_processors[rows[place]] for place in places), strict=True)
    return Call(name, tokens, list(client_ids), list(request_ids))


def _checked(changed: object, given: Tensor) -> Tensor:
    if not isinstance(changed, Tensor):
        raise TypeError(f"it returned a {type(changed).__name__}; must be a tensor")
    if changed.shape != given.shape or changed.dtype != torch.float32 or changed.device != given.device:
        raise ValueError(
            f"it returned {changed.dtype} {list(changed.shape)} on {changed.device}; must be {given.dtype} "
            f"{list(given.shape)} on {given.device}"
        )
    if changed.isnan().any():
        raise ValueError("it returned NaN")
    return bounded(changed, is_banned=changed.isneginf())
