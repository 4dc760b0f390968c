"""The worker process.

The path of a step: the link's thread receives a StepBatch, checks epoch and order, converts it to a `Step` and puts it
into the inbox while the compute loop below still runs the previous step. The loop takes it from there; the runner
applies it to the rows, runs the model and samples. The output goes to the link, which encodes and sends it while the
loop already runs the next step. The next step reads this step's tokens from the rows or, on a GPU, from device memory
(see `steps_in_flight`), so the scheduler can send that step before it has received the tokens.

All computation is done in the main thread, so that there is one team of native threads; all waiting for the network is
done in the link's thread.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

from gpu_worker.batch.step import Step, StepOutput
from gpu_worker.batch.steps_in_flight import MOST, StepsInFlight
from gpu_worker.kind import worker_kind
from gpu_worker.kv.cache import block_bytes
from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.lora.sizes import usual_adapter_bytes
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.images import ImageEncoder
from gpu_worker.models.loader import LoadedModel, compute_dtype, load_model, use_device
from gpu_worker.parallel.ranks import ALONE, Ranks
from gpu_worker.scheduler_link.link import EpochStarted, Pool, SchedulerLink, Stopped, WaitingStep
from gpu_worker.scheduler_link.messages import ENCODER_FEATURES, FEATURES, PROTOCOL_VERSION
from gpu_worker.scheduler_link.request_log import RequestLog
from gpu_worker.sleep import (
    SleepOrdered,
    advise,
    facts_of,
    files_of,
    refuse_changed,
    registration_asleep,
    return_memory,
)
from gpu_worker.step_traces import StepTraces
from gpu_worker.termination_notices import TerminationNotices
from gpu_worker.weight_hasher import WeightHasher
from gpu_worker.weight_updates import WeightsReady, WeightUpdates
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.grammar.process import is_available
from midstream.model.folder import ModelFolder
from midstream.model.weight_tree import stored_root
from midstream.rpc.health import Progress
from midstream.security.curve import WorkerCredentials
from midstream.telemetry import HttpServer, Metrics
from midstream.telemetry.tracing import Tracer
from protos import kind_pb2, worker_pb2

if TYPE_CHECKING:
    from gpu_worker.parallel.group import RankGroup

logger = logging.getLogger(__name__)

_STALL_S = 30.0
_MAX_PRICE = 1e9
# Time between leaving and the end of the process. With the time for handing over, it ends within a second.
_END_S = 0.4


class Worker:
    """Runs the scheduler's steps on one model until stopped."""

    def __init__(self, config: WorkerConfig, folder: ModelFolder, group: RankGroup | None = None) -> None:
        """Load the model. `group` is the group of ranks across which the model is sharded; this process is its rank 0.
        Raises ConfigError if the model folder or a setting is wrong, or UnsupportedError if the model's architecture is
        not supported.
        """
        if not 0 <= config.price_per_hour <= _MAX_PRICE:
            raise ConfigError(f"is {config.price_per_hour}; must be from 0 to {_MAX_PRICE:g}", field="price_per_hour")
        credentials = WorkerCredentials.from_config(config)
        self._tracer = Tracer.from_config(config, "worker")
        self._traces = StepTraces(self._tracer) if self._tracer is not None else None
        self._requests = RequestLog()
        self._group = group
        self._folder, self._facts = folder, facts_of(folder)
        self._sleep_level = 0
        # Load the encoder first, so that its memory is not counted as free for the KV pool.
        images = _image_encoder(config, folder, ALONE if group is None else group.ranks)
        self._runner = ModelRunner(config, folder, leader=None if group is None else group.leader)
        metrics, progress = Metrics(), Progress()
        self._config, self._metrics = config, metrics
        self._loop = progress.loop("compute", _STALL_S)
        world_size = 1 if group is None else group.ranks.world_size
        registration = _registration(config, folder, self._runner, world_size, has_images=images is not None)
        tensor_size = 1 if group is None else group.ranks.tensor_size
        registration.kind.CopyFrom(_kind(config, folder, self._runner, tensor_size, stored_root(folder)))
        self._registration = registration
        if not _refusal_of_updates(group, images):
            registration.features.append("sleep")
        self._hasher = None
        self._weights_lock = threading.Lock()  # between the end of the hashing and a change of the weights
        self._num_changes = 0
        self._stored_root = registration.kind.weights_root
        if config.hash_bytes_per_s > 0:
            self._hasher = WeightHasher(folder, config.hash_bytes_per_s, functools.partial(self._note_root, 0))
        tiers = self._runner.kv.tiers
        self._kv_metrics = self._count_kv()
        self._link = SchedulerLink(
            config.scheduler,
            registration,
            metrics,
            functools.partial(memory_usage, self._runner.model.device),
            self._runner.adapters,
            self._new_kept_blocks(),
            credentials,
            tiers,
            self._runner.kv.fetcher,
            images,
        )
        self._updates = WeightUpdates(
            config,
            folder,
            registration.kind.arithmetic,
            answer=self._link.answer_weights,
            switch=self._link.interrupt,
            refusal=_refusal_of_updates(group, images),
        )
        self._link.on_weights = self._updates.take
        self._link.leave_blocks = self._leave_blocks
        most = max(MOST, self._runner.num_micro_batches)
        self._in_flight = StepsInFlight(self._runner, self._link.inbox, most)
        self._notices = TerminationNotices(config, self._link.leave)
        self._http = HttpServer(config.host, config.http_port, metrics, progress.problems)
        self._steps = metrics.counter("worker_steps", "Steps executed.")
        self._tokens = metrics.counter("worker_tokens", "Tokens sampled.")
        self._adopted = metrics.counter(
            "worker_blocks_adopted", "KV blocks adopted from workers that died, or fetched from tiers."
        )
        self._saved = metrics.counter(
            "worker_kv_saved_seconds", "Time that adopted blocks saved, estimated from the steps that compute prompts."
        )
        self._context_s, self._num_context_tokens = 0.0, 0
        self._step_seconds = metrics.histogram("worker_step_seconds", "Time of forward pass and sampling of a step.")

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a rejection; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._link.leave())
        signal.set_wakeup_fd(self._link.signal_descriptor, warn_on_full_buffer=False)
        if self._group is None:
            self._link.on_left = self._limit_end
        if self._group is not None:
            self._group.monitor.on_drain(self._link.leave)
            self._group.monitor.watch(lambda: self._loop.is_stalled)
        self._http.start()
        self._notices.start()
        self._link.start()
        logger.info("ready", extra={"http_port": self._http.port})
        if self._hasher is not None:
            self._hasher.start()
        stopped = self._serve()
        self._notices.close()
        if self._hasher is not None:
            self._hasher.close()
        signal.set_wakeup_fd(-1)
        self._link.join()
        # The HTTP port closes with the process: waiting for its thread would only delay the end.
        if not self._sleep_level:
            self._runner.close()
        if self._group is not None:
            self._group.stop(stopped.exit_code)
        if self._tracer is not None:
            self._tracer.close()
        logger.log(logging.ERROR if stopped.exit_code else logging.INFO, "stopped: %s", stopped.reason)
        return stopped.exit_code

    def _leave_blocks(self) -> bool:
        return not self._sleep_level and self._runner.kv.leave()

    def _limit_end(self) -> None:
        """End the process soon, whatever it waits for: a long step, a full disk or a collector that does not answer.

        All that others need was handed over. What is left in shared memory is removed by others, as after a death.
        """

        def end() -> None:
            logger.warning("stopped: left %.1f s ago, but the last step or the clean-up has not ended", _END_S)
            logging.shutdown()
            os._exit(0)

        timer = threading.Timer(_END_S, end)
        timer.daemon = True
        timer.start()

    def _note_root(self, num_changes: int, root: str) -> None:
        """Announce the complete identity of the weights, and use it for transfers of KV blocks from now on.

        If it is not the one under which the worker has registered, a file was damaged since it was hashed, perhaps
        before it was loaded. The process then ends, so that its requests are recomputed elsewhere, and its successor
        has the right identity.
        """
        with self._weights_lock:
            if self._num_changes != num_changes:
                return  # these are no longer the worker's weights, or it sleeps
            self._note_own_root(root)

    def _note_own_root(self, root: str) -> None:
        if self._stored_root not in ("", root):
            logger.critical("a weight file was damaged: its contents have changed, but not its times")
            os._exit(1)
        if not self._stored_root:
            self._link.announce_weights(root, self._runner.note_weights(root))

    def _serve(self) -> Stopped:
        while True:
            if not self._in_flight:
                self._loop.idle()
            work = self._in_flight.next()
            self._loop.touch()
            if work is None:
                self._deliver()
            elif isinstance(work, WaitingStep):
                self._execute(work)
            elif isinstance(work, EpochStarted):
                self._in_flight.clear()
                self._updates.begin_epoch()
                if not self._sleep_level:
                    self._runner.clear()
                self._requests.clear()
                if self._traces is not None:
                    self._traces.clear()
            elif isinstance(work, WeightsReady):
                self._change_weights(work)
            elif isinstance(work, SleepOrdered):
                self._set_sleep(work.level)
            else:
                return work

    def _change_weights(self, ready: WeightsReady) -> None:
        """Replace the model, its KV pool and all that was computed with it, and register again.

        A failure on the way ends the process, which starts again with the folder in its settings.
        """
        started = time.perf_counter()
        self._release("its weights are replaced")
        self._folder, self._facts = ready.weights.folder, ready.weights.facts
        self._registration.kind.weights_root = ready.weights.root
        self._registration.kind.weights_version = ready.version
        self._take_memory(ready.weights.model)
        logger.info(
            "changed the weights in %.2f s",
            time.perf_counter() - started,
            extra={"weights_root": ready.weights.root, "version": ready.version},
        )

    def _set_sleep(self, level: int) -> None:
        """Give the memory of model and KV pool back, or take it again, and register again.

        If the files have changed meanwhile, or there is no memory, the process ends; it starts again with the folder in
        its settings.
        """
        started = time.perf_counter()
        if level:
            self._release("it goes to sleep")
            advise(files_of(self._folder), level)
            self._sleep_level = level
            self._link.resume(registration_asleep(self._registration, level))
            logger.info("sleeps at level %d after %.2f s", level, time.perf_counter() - started)
        elif self._sleep_level:
            self._release("it wakes up")
            model = load_model(self._config, self._folder)
            refuse_changed(self._folder, self._facts)
            self._take_memory(model)
            logger.info("woke up in %.2f s", time.perf_counter() - started)
        else:
            self._link.resume_unchanged()

    def _release(self, reason: str) -> None:
        """Leave the epoch, and give up the model and its KV pool."""
        while self._in_flight:
            self._deliver()
        self._loop.idle()  # this takes as long as at the start, and is no stall
        self._link.suspend(reason)
        with self._weights_lock:
            self._num_changes += 1
            if self._hasher is not None:
                self._hasher.close()
        if not self._sleep_level:
            self._kv_metrics.drop()
            self._runner.release()
        return_memory()

    def _take_memory(self, model: LoadedModel) -> None:
        """Build a runner and its KV pool for a model, and register again."""
        config, folder, earlier = self._config, self._folder, self._registration
        self._sleep_level = 0
        self._runner = ModelRunner(config, folder, model)
        self._in_flight.use_runner(self._runner)
        self._kv_metrics = self._count_kv()
        registration = _registration(config, folder, self._runner, 1, has_images=False)
        registration.features.append("sleep")
        kind = _kind(config, folder, self._runner, 1, earlier.kind.weights_root)
        kind.weights_version = earlier.kind.weights_version
        registration.kind.CopyFrom(kind)
        registration.incarnation = earlier.incarnation
        self._registration = registration
        kv = self._runner.kv
        if kind.weights_root:
            registration.block_kind = self._runner.note_weights(kind.weights_root)
        elif config.hash_bytes_per_s > 0:
            with self._weights_lock:
                on_root = functools.partial(self._note_root, self._num_changes)
                self._hasher = WeightHasher(folder, config.hash_bytes_per_s, on_root)
            self._hasher.start()
        self._link.resume(registration, Pool(self._runner.adapters, self._new_kept_blocks(), kv.tiers, kv.fetcher))

    def _new_kept_blocks(self) -> KeptBlocks:
        tiers = self._runner.kv.tiers
        return KeptBlocks(self._runner.kv.block_hashes, None if tiers is None else tiers.offer)

    def _count_kv(self) -> Metrics:
        """Return metrics of the KV pool and its tiers."""
        metrics, kv = Metrics(whole=self._metrics), self._runner.kv
        for part in (kv.tiers, kv.store, kv.fetcher, kv.server):
            if part is not None:
                part.count(metrics)
        return metrics

    def _execute(self, work: WaitingStep) -> None:
        step = work.step
        if step.epoch != self._link.epoch:
            return
        waiting_s = time.perf_counter() - work.received_at
        self._requests.note(step)
        while self._in_flight and self._runner.must_finish_before(step):
            self._deliver()
        if step.epoch == self._link.epoch:
            with self._abandoning(step):
                self._in_flight.launch(step, waiting_s)

    @contextmanager
    def _abandoning(self, step: Step) -> Iterator[None]:
        """End the epoch if the body of the context raises while it runs this step."""
        try:
            yield
        except Exception:
            # After a CUDA error nothing works any more, so the process exits; on a CPU it is enough to start a new
            # epoch.
            logger.exception("step %d failed", step.step_id, extra={"request_ids": self._requests.involved(step)})
            if self._group is not None and self._group.has_failed:
                self._group.fail("a step failed while all ranks worked on it")
            if self._runner.model.device.type != "cpu":
                raise
            self._in_flight.clear()
            self._link.abandon_epoch()

    def _deliver(self) -> None:
        """Finish the oldest step in flight and send its result to the scheduler."""
        finished = None
        with self._abandoning(self._in_flight.oldest):
            finished = self._in_flight.finish()
        if finished is not None:
            self._report(*finished)

    def _report(self, step: Step, output: StepOutput, waiting_s: float) -> None:
        self._link.send_result(step, output, waiting_s)
        self._requests.note_failures(output)
        self._steps.inc()
        self._tokens.inc(len(output.token_ids))
        self._note_contexts(step, output)
        self._step_seconds.observe(output.forward_s)
        if self._traces is not None:
            self._traces.note(step, output, waiting_s)

    def _note_contexts(self, step: Step, output: StepOutput) -> None:
        """Count the blocks that were adopted, and the time that computing them would have taken."""
        if num_tokens := int(step.context_lengths.sum()):
            self._context_s += output.forward_s
            self._num_context_tokens += num_tokens
        num_adopted = len(step.adopted_blocks) - len(output.missing_blocks)
        self._adopted.inc(num_adopted)
        if num_adopted and self._num_context_tokens:
            s_per_token = self._context_s / self._num_context_tokens
            self._saved.inc(num_adopted * self._runner.kv.tokens_per_block * s_per_token)


def _image_encoder(config: WorkerConfig, folder: ModelFolder, ranks: Ranks) -> ImageEncoder | None:
    """Return the image encoder, on the decoder's device and in its data type; None if the model reads no images."""
    if folder.image_token_id is None:
        return None
    device = use_device(config, ranks)
    return ImageEncoder(folder, device, compute_dtype(config, device))


def _refusal_of_updates(group: RankGroup | None, images: ImageEncoder | None) -> str:
    if group is not None:
        return "a worker of several ranks cannot change its weights in place; restart it with the other model folder"
    if images is not None:
        return "a worker that encodes images cannot change its weights in place; restart it with the other model folder"
    return ""


def _kind(
    config: WorkerConfig, folder: ModelFolder, runner: ModelRunner, tensor_size: int, root: str
) -> kind_pb2.WorkerKind:
    kind = worker_kind(config, folder, runner.model, tensor_size)
    return kind_pb2.WorkerKind(
        model_fingerprint=kind.model_fingerprint,
        weights_root=root,
        arithmetic=kind.arithmetic,
        description=kind.description,
    )


def _registration(
    config: WorkerConfig, folder: ModelFolder, runner: ModelRunner, world_size: int, *, has_images: bool
) -> worker_pb2.Register:
    model = runner.model
    return worker_pb2.Register(
        group_id=config.group_id or f"{socket.gethostname()}-{config.name or os.getpid()}",
        incarnation=secrets.randbits(64),
        tokens_per_block=config.tokens_per_block,
        num_blocks=runner.kv.num_blocks,
        vocab_size=model.description.vocab_size,
        max_sequence_length=runner.max_sequence_length,
        max_batch_size=config.max_batch_size,
        max_num_tokens=runner.max_num_tokens,
        world_size=world_size,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        features=features_of(runner) + ["vision"] * has_images,
        protocol_version=PROTOCOL_VERSION,
        lora_cache_bytes=runner.adapters.device_bytes,
        kv_store=runner.kv.store_name,
        tier_store="" if runner.kv.tiers is None else runner.kv.tiers.name,
        block_bytes=block_bytes(model.description, config.tokens_per_block, model.kv_dtype),
        attention_windows=() if model.is_encoder else model.description.reaches,
        max_attention_window=config.max_attention_window,
        role=config.role,
        kv_source="" if runner.kv.server is None else str(runner.kv.server.source),
        block_kind=runner.kv.transfer_kind,
        sink_token_length=config.sink_token_length,
        num_micro_batches=runner.num_micro_batches,
        price_per_hour=config.price_per_hour,
        max_loras=runner.adapters.device_bytes // usual_adapter_bytes(model.description, model.dtype.itemsize),
    )


def features_of(runner: ModelRunner) -> list[str]:
    """Return the names of the features to register: post-processors by name, probes with their width and name."""
    features = [*FEATURES]
    if runner.model.is_encoder:
        features = [*ENCODER_FEATURES]
    if runner.model.description.state_size:
        # A recurrent state cannot be rolled back when drafts are rejected.
        features.remove("speculative")
        features.append("recurrent_state")
    if runner.model.takes_lora:
        features.append("lora")
    if is_available() and not runner.model.is_encoder:
        features.append("guided_decoding")
    if runner.post_processors:
        features.append("logits_post_processor")
    if runner.has_draft_model:
        features.append("draft_model")
    features += [f"output_probe.{probe.width}.{name}" for name, probe in runner.output_probes.items()]
    return features + [f"logits_post_processor.{name}" for name in runner.post_processors]


def memory_usage(device: torch.device) -> worker_pb2.MemoryUsage:
    """Return how much memory this process uses on the host and on `device`.

    The link's thread calls this, and its current CUDA device is not the one that the compute thread chose.
    """
    usage = worker_pb2.MemoryUsage(cpu_bytes=psutil.Process().memory_info().rss)
    if device.type == "cuda":
        usage.gpu_bytes = torch.cuda.memory_reserved(device)
        usage.pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return usage
