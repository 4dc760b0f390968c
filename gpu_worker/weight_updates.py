"""Updates of the weights in place: other weights are loaded beside the worker's own, by a thread, while steps run.

The compute loop replaces its model only by one that was loaded and checked completely, so a worker has the old weights
or the new ones. A process that dies during an update starts again with the folder in its settings; the scheduler then
tells it to change to the weights that all workers are to have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.kind import worker_kind
from gpu_worker.models.loader import LoadedModel, load_beside
from gpu_worker.sleep import Facts, facts_of, refuse_changed
from midstream.config import WorkerConfig
from midstream.errors import (
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    UnsupportedError,
)
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.weight_tree import hash_weights
from protos import worker_pb2

logger = logging.getLogger(__name__)

# Entries of config.json that say where a model comes from, not what it computes.
_COSMETIC = frozenset(("_name_or_path", "transformers_version"))
_SAME = ("vocab_size", "hidden_size", "num_layers", "max_sequence_length", "end_ids", "tokenizer_fingerprint")


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights that are loaded and checked.

    Attributes:
        root: Root of the tree over the weights (WorkerKind.weights_root).
        facts: Of the files, as they were loaded.
    """

    folder: ModelFolder
    model: LoadedModel
    root: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """The compute loop is to replace its weights."""

    weights: PreparedWeights
    version: str


@dataclass(frozen=True, slots=True)
class _Preparation:
    update: int
    weights: Future[PreparedWeights]
    is_wanted: bool  # whether the worker is to change to them, whatever becomes of the epoch


class WeightUpdates:
    """Handles the scheduler's messages about weights, and holds the weights that are prepared, at most one version."""

    def __init__(
        self,
        config: WorkerConfig,
        folder: ModelFolder,
        arithmetic: str,
        *,
        answer: Callable[[worker_pb2.WeightsPrepared], None],
        switch: Callable[[WeightsReady], None],
        refusal: str = "",
    ) -> None:
        """Create the handler.

        Args:
            folder: The folder with which the worker has started.
            arithmetic: WorkerKind.arithmetic of the worker.
            answer: Sends an answer to the scheduler; any thread calls it.
            switch: Called with weights to change to; any thread calls it.
            refusal: Why this worker cannot change its weights; empty if it can.
        """
        self._config, self._folder, self._refusal = config, folder, refusal
        self._arithmetic = arithmetic
        self._answer, self._switch = answer, switch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._lock = threading.Lock()
        self._current: _Preparation | None = None

    def take(self, message: worker_pb2.SchedulerMessage, epoch: int) -> None:
        """Handle a message; ignore those of other epochs. Called by the link's thread."""
        if message.HasField("prepare_weights") and message.prepare_weights.epoch == epoch:
            prepare = message.prepare_weights
            found = self._prepare(prepare.update, prepare.path, is_wanted=False)
            found.add_done_callback(lambda done: self._report(done, epoch, prepare.update))
        elif message.HasField("switch_weights") and message.switch_weights.epoch == epoch:
            wanted = message.switch_weights
            with self._lock:
                current = self._current
            is_prepared = current is not None and current.update == wanted.update
            found = (
                current.weights
                if current is not None and is_prepared
                else self._prepare(wanted.update, wanted.path, is_wanted=True)
            )
            found.add_done_callback(lambda done: self._change(done, wanted))
        elif message.HasField("drop_weights"):
            with self._lock:
                if self._current is not None and self._current.update == message.drop_weights.update:
                    self._current = None

    def begin_epoch(self) -> None:
        """Drop weights that were prepared for an earlier epoch: its scheduler has died, or has given the update up."""
        with self._lock:
            if self._current is not None and not self._current.is_wanted:
                self._current = None

    def _prepare(self, update: int, path: str, *, is_wanted: bool) -> Future[PreparedWeights]:
        with self._lock:
            self._current = None  # frees its memory before other weights are loaded
            future = self._thread.submit(self._load, path)
            self._current = _Preparation(update, future, is_wanted)
            return future

    def _report(self, done: Future[PreparedWeights], epoch: int, update: int) -> None:
        result = worker_pb2.WeightsPrepared(epoch=epoch, update=update)
        error = done.exception()
        if error is None:
            weights = done.result()
            result.model_fingerprint, result.weights_root = weights.folder.fingerprint, weights.root
        else:
            result.error.CopyFrom(_as_midstream(error).to_proto())
        self._answer(result)

    def _change(self, done: Future[PreparedWeights], wanted: worker_pb2.SwitchWeights) -> None:
        error = done.exception()
        if error is None and done.result().root != wanted.weights_root:
            error = InvalidArgumentError(
                f"the files in {wanted.path} have the root {done.result().root}; must have {wanted.weights_root}",
                field="path",
            )
        with self._lock:
            # A worker that has registered again while it loaded was told twice.
            is_first = self._current is not None and self._current.weights is done
            if is_first:
                self._current = None
        if error is None and is_first:
            self._switch(WeightsReady(done.result(), wanted.weights_version))
        elif error is not None:
            error = _as_midstream(error)
            logger.error("cannot change the weights: %s", error)
            failed = worker_pb2.WeightsPrepared(epoch=wanted.epoch, update=wanted.update, error=error.to_proto())
            self._answer(failed)

    def _load(self, path: str) -> PreparedWeights:
        """Load and check the weights in `path`. Raises MidstreamError if they cannot replace the worker's own."""
        if self._refusal:
            raise UnsupportedError(self._refusal)
        started = time.monotonic()
        folder = open_update(path, self._config, self._folder)
        refuse_other_model(folder, self._folder)
        facts = facts_of(folder)
        root = hash_weights(folder)
        model = load_beside(self._config, folder)
        refuse_changed(folder, facts)
        found = worker_kind(self._config, folder, model, 1)
        if found.arithmetic != self._arithmetic:
            raise InvalidArgumentError(f"they would be computed differently: {found.description}", field="path")
        logger.info("prepared weights in %.1f s", time.monotonic() - started, extra={"path": path, "root": root})
        return PreparedWeights(folder, model, root, facts)


def open_update(path: str, config: WorkerConfig, own: ModelFolder) -> ModelFolder:
    """Open the folder of an update. Raises InvalidArgumentError if it is neither the worker's own nor below the setting
    `update_root`, or ConfigError if it is not a model folder.
    """
    place = Path(path)
    if not place.is_absolute() or "\0" in path:
        raise InvalidArgumentError("must be an absolute path", field="path")
    resolved = place.resolve()
    is_below = bool(config.update_root) and resolved.is_relative_to(Path(config.update_root).resolve())
    if not is_below and resolved != own.path.resolve():
        raise InvalidArgumentError("is outside the folder for updates (--update-root) of a worker", field="path")
    if not resolved.is_dir():
        raise InvalidArgumentError(f"{path} is not a folder on a worker", field="path")
    return open_model_folder(str(resolved))


def refuse_other_model(folder: ModelFolder, own: ModelFolder) -> None:
    """Raise InvalidArgumentError if a folder differs from the worker's own in more than its weights."""
    for name in _SAME:
        if getattr(folder, name) != getattr(own, name):
            raise InvalidArgumentError(f"{name} differs from that of the served model", field="path")
    for name in sorted({*folder.config, *own.config} - _COSMETIC):
        if folder.config.get(name) != own.config.get(name):
            raise InvalidArgumentError(f"{name} in config.json differs from that of the served model", field="path")


def _as_midstream(error: BaseException) -> MidstreamError:
    if isinstance(error, MidstreamError):
        return error
    return ExecutionError(f"the weights cannot be loaded: {type(error).__name__}: {error}"[:500])
