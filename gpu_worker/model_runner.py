"""Runs steps on a model: rows and tensors in, tokens out. It is independent of sockets and protobuf.

A step is launched and then finished. On a GPU the next one may be launched in between: sampled tokens stay on the
device as inputs of the next step, rows hold placeholders, and the host reads the tokens when the step is finished. Rows
with penalties or a grammar need the tokens of the previous step on the host: the host waits for these while the device
runs the model, and then launches the sampling. Steps whose logits are needed on the host, or whose outcome the
scheduler must know first, are complete when launch returns.

In a pipeline of CPU ranks, `launch` begins a pass on the first stage, and `finish` samples once the other stages have
completed the pass. Steps without common rows are launched in between, one per stage.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.batch.input_batch import ContextChunk, InputBatch, PreparedStep
from gpu_worker.batch.rows import PendingTokens, Rows
from gpu_worker.batch.staging import Copy, Readback
from gpu_worker.batch.step import EMPTY, GREEDY, IntArray, RowLogProbs, RowTensor, Step, StepOutput
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.device_memory import WarmUpMemory, empty_cache
from gpu_worker.features import Feature
from gpu_worker.kv.block_format import kind_digest
from gpu_worker.kv.block_kind import block_kind
from gpu_worker.kv.cache import KvCache
from gpu_worker.kv.shared_store import KvStore, free_bytes
from gpu_worker.kv.tiers import UNUSED_HOST_S, KvTiers, TierFolder
from gpu_worker.limits import Limits, graph_decoder, local_num_blocks, may_run_ahead
from gpu_worker.lora.adapter import zero_adapter
from gpu_worker.lora.cache import adapter_cache
from gpu_worker.lora.rows import RowAdapters
from gpu_worker.models.decoder import ChoosingDecoder, ForwardInputs, Probe
from gpu_worker.models.loader import LoadedModel, load_model, num_threads
from gpu_worker.sampling.beam_stops import BeamStops
from gpu_worker.sampling.beams import Candidates
from gpu_worker.sampling.guided import UNCONSTRAINED, Constraints, Guides
from gpu_worker.sampling.output_probes import ClassScores, load_output_probes, refuse_unknown_probes
from gpu_worker.sampling.outputs import Reporter, Reports
from gpu_worker.sampling.post_processors import load_post_processors, refuse_unknown
from gpu_worker.sampling.sampler import Chosen, Sampled, Sampler, digests_of
from gpu_worker.speculation.draft_model import DraftModel, load_draft_model
from gpu_worker.speculation.drafts import Drafter
from gpu_worker.speculation.verification import Answer, settle
from gpu_worker.warm_up import CPU_NUM_TOKENS, FullBatches, short_query_steps, warm_up_steps
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, MidstreamError, UnsupportedError
from midstream.grammar.process import GrammarProcess
from midstream.model.folder import ModelFolder
from midstream.model.sentence_transformers import CLASS_SCORES
from midstream.model.tokenizer import Tokenizer
from midstream.text.incremental import decoder_factory

if TYPE_CHECKING:
    from gpu_worker.parallel.leader import Leader, LeadingDecoder

logger = logging.getLogger(__name__)

_Run = Callable[[PreparedStep, ForwardInputs, IntArray], tuple[Sampled | None, Reports]]


@dataclass(slots=True, eq=False)
class Launched:
    """The state of a step between `launch` and `finish`.

    Attributes:
        missing_blocks: Blocks to adopt whose contents were not found.
        open_pass: The prepared step and its probe, if the pipeline stages compute its forward pass; otherwise None.
    """

    started: float
    missing_blocks: IntArray = field(default_factory=lambda: EMPTY)
    chosen: Chosen | None = None
    pending: PendingTokens | None = None
    copy: Copy | None = None
    output: StepOutput | None = None
    open_pass: tuple[PreparedStep, Probe | None] | None = None

    @property
    def is_silent(self) -> bool:
        """Return whether the only way to find out if the output is ready is to wait for it."""
        return self.open_pass is not None and self.output is None

    def is_needed_by(self, changed: IntArray, run: IntArray) -> bool:
        """Return whether a step that changes and runs these rows must wait until the open pass has ended."""
        if self.open_pass is None:
            return False
        step = self.open_pass[0]
        used = np.concatenate([step.sampled_rows, _rows_of(step.contexts), _rows_of(step.failed_contexts)])
        return bool(np.isin(changed, used).any() or np.isin(run, step.sampled_rows).any())

    @property
    def is_done(self) -> bool:
        """Return whether the step's output is ready."""
        return self.output is not None or (self.copy is not None and self.copy.is_done)


class ModelRunner:
    """A loaded model with its KV pool and the rows of its sequences.

    Attributes:
        max_sequence_length: Prompt and output together, in tokens.
        runs_ahead: Whether a step may be launched before the previous step has finished.
        num_micro_batches: Number of steps without common rows that run at the same time.
    """

    def __init__(
        self,
        config: WorkerConfig,
        folder: ModelFolder,
        model: LoadedModel | None = None,
        leader: Leader | None = None,
        *,
        runs_ahead: bool | None = None,
    ) -> None:
        """Load the model unless one is given, warm it up, and allocate the KV pool.

        Args:
            model: The model, if it is already loaded.
            leader: Leader of the ranks that hold its other parts; None if this rank holds all of it.
            runs_ahead: Whether a step may be launched before the previous step has finished; None means as in the
                settings.

        Raises:
            ConfigError: The folder or a setting is wrong.
            UnsupportedError: The model's architecture is not supported.
        """
        torch.set_num_threads(num_threads(config))
        self.model: LoadedModel = model or load_model(config, folder, None if leader is None else leader.communicator)
        self._limits = Limits.of(config, folder, self.model)
        self.max_sequence_length = self._limits.max_sequence_length
        self.max_num_tokens = self._limits.max_num_tokens
        self._leader = leader
        self._config = config
        self._folder = folder
        self._draft = load_draft_model(config, self.model.description) if config.draft_model else None
        if self._draft is not None and (self.model.description.state_size or self._draft.description.state_size):
            raise UnsupportedError("a recurrent state cannot be reset to before rejected drafts", field="draft_model")
        self.output_probes = {**load_output_probes(self.model.description.num_layers), **self.model.probes}
        if folder.num_labels is not None:
            self.output_probes[CLASS_SCORES] = ClassScores(folder.num_labels)
        self.post_processors = load_post_processors(config.logits_post_processors)
        self.adapters = adapter_cache(
            config,
            self.model,
            lambda adapter: self.model.decoder.place_adapter(adapter),  # noqa: PLW0108 (the decoder is set later)
        )
        is_gpu = self.model.device.type == "cuda"
        self.runs_ahead = may_run_ahead(config, self.model) if runs_ahead is None else runs_ahead
        self._in_flight: deque[Launched] = deque()
        self._last_end = 0.0
        self._pools: list[KvCache] = []
        self._draft_front: GraphDecoder | None = None
        self._front = self._with_graphs() if is_gpu or self.runs_ahead else None
        self._readback = Readback(self.model.device, config.max_batch_size)
        self._stages: LeadingDecoder | None = None
        if leader is not None:
            leading = leader.lead(self.model.decoder, self.model.shard)
            self.model = replace(self.model, decoder=leading)
            self._stages = leading if self._front is None and leader.communicator.ranks.pipeline_size > 1 else None
        self.num_micro_batches = 1
        if leader is not None and self._stages is not None:
            self.num_micro_batches = leader.communicator.ranks.pipeline_size
        num_blocks = self._choose_num_blocks(self._warm_up())
        is_whole = leader is None and self._draft is None
        self._take_blocks(num_blocks, _shared_store(config, folder, self.model) if is_whole else None)
        _open_tiers(config, folder, self.model, self.kv, is_whole=is_whole)
        _open_transfers(config, folder, self.model, self.kv, is_whole=is_whole)
        if self._front is not None:
            self._record(self._front)
            # Free the device memory of the largest steps now, so that no client has to wait for it later.
            self._run_largest_steps()

    def note_weights(self, root: str) -> str:
        """Use the complete identity of the weights for transfers of blocks from now on; return `transfer_kind`.

        The pool in shared memory and the tiers keep the kind with which they were opened, which names these very files.
        """
        self.kv.use_transfer_kind(kind_digest(block_kind(self._config, self._folder, self.model, root)))
        return self.kv.transfer_kind

    def close(self) -> None:
        """Stop helper processes and release recorded graphs; call it before the ranks disconnect."""
        self._in_flight.clear()
        for graphs in (self._front, self._draft_front):
            if graphs is not None:
                graphs.close()
        self._guides.close()
        self.kv.close()

    def release(self) -> None:
        """Close the runner, and free its KV pool and its model. Nothing else can be done with it afterwards."""
        device = self.model.device
        self.close()
        self.adapters.close()
        for pool in self._pools:
            pool.release()
        vars(self).clear()  # others still refer to the runner, for example the adapter cache
        empty_cache(device)

    def clear(self) -> None:
        """Remove all sequences; the pool's contents remain but are not referenced."""
        if self._stages is not None:
            self._stages.end_all()
        self._in_flight.clear()
        self._batch.clear()

    def must_finish_before(self, step: Step) -> bool:
        """Return whether a step in flight must be finished before this one can be launched."""
        return self._num_needed(step) > 0

    def _num_needed(self, step: Step) -> int:
        """Return how many of the passes in flight, oldest first, must end before this step is prepared."""
        if self._stages is None or not self._in_flight:
            return 0
        rows = self._batch.rows_of(step)
        return max((n for n, launched in enumerate(self._in_flight, 1) if launched.is_needed_by(*rows)), default=0)

    def run_step(self, step: Step) -> StepOutput:
        """Execute one step.

        Raises:
            ExecutionError: The step contradicts earlier steps; call `clear` before the next one.
        """
        return self.finish(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Launch a step. This waits at most for the step launched before the previous one or, if rows use extra
        features, for the previous one.

        Raises:
            ExecutionError: The step contradicts earlier steps; call `clear` before the next one.
        """
        launched = Launched(time.perf_counter())
        if self._stages is not None:
            self._settle_all_but(len(self._in_flight) - self._num_needed(step))
        else:
            # Only the tokens of the previous step are on the device as inputs for this one.
            self._settle_all_but(0 if step.forks or len(step.beam_rows) or len(step.draft_rows) else 1)
        prepared = self._batch.prepare(
            refuse_unknown_probes(refuse_unknown(step, self.post_processors), self.output_probes)
        )
        if len(step.adopted_blocks):
            launched.missing_blocks = self.kv.adopt(step.adopted_hashes, step.adopted_blocks)
        if len(step.copy_sources):
            self._copy_blocks(step.copy_sources, step.copy_targets)
        if self._front is not None and prepared.inputs is not None and self._can_run_ahead(prepared):
            rows = prepared.sampled_rows
            logits = self.model.decoder.forward(prepared.inputs)
            chosen = self._chosen_in_graph(self._front, rows, _rows_of(prepared.contexts))
            if chosen is None:
                chosen = self._sampler.choose(logits, rows, self._constraints_behind(prepared))
                self._front.feed(chosen.token_ids)
            launched.chosen = chosen
            launched.copy, launched.pending = self._readback.start(chosen.values), self._rows.append_pending(rows)
            self._in_flight.append(launched)
        elif self._stages is not None and prepared.inputs is not None and not prepared.drafts.tokens:
            launched.open_pass = prepared, self._reporter.probe(prepared)
            self._stages.begin(prepared.inputs, launched.open_pass[1])
            self._in_flight.append(launched)
        else:
            if prepared.inputs is not None:
                self._settle_all_but(0)
            launched.output = self._complete(prepared, launched.started, self._run_model)
        return launched

    def finish(self, launched: Launched) -> StepOutput:
        """Wait for a step and return its output. Steps must be finished in the order in which they were launched."""
        if launched.output is None:
            self._settle_all_but(len(self._in_flight) - 1 - self._in_flight.index(launched))
        assert launched.output is not None
        if len(launched.missing_blocks):
            return replace(launched.output, missing_blocks=tuple(launched.missing_blocks.tolist()))
        return launched.output

    def _can_run_ahead(self, prepared: PreparedStep) -> bool:
        """Return whether the next step may be launched before the host knows the tokens of this one."""
        rows = prepared.sampled_rows
        return (
            self.runs_ahead
            and len(rows) <= self._config.max_batch_size
            and not prepared.drafts.tokens
            and not prepared.reports_digests
            and bool(prepared.is_run.all())
            and not prepared.failed_contexts
            and self._sampler.can_choose(rows)
            and self._sampler.can_choose(_rows_of(prepared.contexts))
        )

    def _chosen_in_graph(self, front: GraphDecoder, rows: IntArray, others: IntArray) -> Chosen | None:
        """Return the tokens that graphs chose in the last pass and stored for the next one; None if no graph did, or if
        these rows need more processing.
        """
        tokens = front.best(len(rows))
        # Return None also for a prompt that has a grammar but does not sample yet, so that `_constraints_behind` starts
        # to compile the grammar.
        if tokens is None or not self._sampler.is_plain(rows) or not self._sampler.is_plain(others):
            return None
        if not self._sampler.is_greedy(rows):
            tokens = front.draw(self._sampler.draw_params(rows))
        return None if tokens is None else Chosen(tokens, rows, tokens)

    def _constraints_behind(self, prepared: PreparedStep) -> Constraints:
        """Return the grammar masks of a step whose forward pass was launched, after waiting for the tokens on which
        they depend.

        The device computes the pass in the meantime.
        """
        rows, others = prepared.sampled_rows, _rows_of(prepared.contexts)
        if self._sampler.is_plain(rows) and self._sampler.is_plain(others):
            return UNCONSTRAINED
        self._settle_all_but(0)
        return self._guides.answer() if self._guides.ask(rows, others.tolist()) else UNCONSTRAINED

    def _settle_all_but(self, count: int) -> None:
        """Wait for all but the last `count` steps in flight, and store their tokens in the rows."""
        while len(self._in_flight) > count:
            launched = self._in_flight.popleft()
            if launched.open_pass is not None:
                prepared, probe = launched.open_pass
                started = max(launched.started, self._last_end)
                launched.output = self._complete(prepared, started, functools.partial(self._end_pass, probe))
                self._last_end = time.perf_counter()
                continue
            assert launched.chosen is not None
            assert launched.copy is not None
            assert launched.pending is not None
            sampled = launched.chosen.read(launched.copy.wait())
            self._rows.fill(launched.pending, sampled.token_ids)
            errors = tuple((int(launched.chosen.rows[place]), error) for place, error in sampled.errors)
            # Exclude the time spent waiting for the previous step.
            now = time.perf_counter()
            took = now - max(launched.started, self._last_end)
            launched.output = StepOutput(sampled.token_ids, sampled.log_probs, errors, took)
            self._last_end = now

    def _complete(self, prepared: PreparedStep, started: float, run: _Run) -> StepOutput:
        """Complete a step; `run` runs the model and samples."""
        rows, is_run = prepared.sampled_rows, prepared.is_run
        token_ids = np.zeros(len(rows), dtype=np.int32)
        errors: list[tuple[int, MidstreamError]] = []
        log_probs: tuple[RowLogProbs, ...] = ()
        candidates: dict[int, Candidates] = {}
        reports, traces = Reports(), tuple[RowTensor, ...]()
        digests = np.zeros(len(rows) if prepared.reports_digests else 0, dtype=np.uint64)
        if prepared.inputs is not None:
            run_rows = rows[is_run]
            sampled, reports = run(prepared, prepared.inputs, run_rows)
            errors += reports.errors
            if sampled is not None:
                token_ids[is_run] = sampled.token_ids
                log_probs, candidates, traces = sampled.log_probs, sampled.candidates, sampled.traces
                if sampled.digests:
                    digests[is_run] = sampled.digests
                errors += [(int(run_rows[place]), error) for place, error in sampled.errors]
                candidates, failed = self._beam_stops.find(run_rows, candidates)
                errors += failed
            elif self.model.device.type == "cuda":
                # Nothing was read from the device, so wait for it: a step that has finished must have filled its
                # blocks.
                torch.cuda.current_stream(self.model.device).synchronize()
        if not is_run.all():
            errors += [(row, self._rows.failed[row]) for row in rows[~is_run].tolist()]
        # Report failed chunks immediately, since sequences that share their blocks depend on them.
        errors += [(chunk.row, self._rows.failed[chunk.row]) for chunk in prepared.failed_contexts if not chunk.samples]
        if prepared.drafts.tokens or (self._rows.features[rows] & Feature.BEAMS).any():
            answer = settle(
                self._rows,
                prepared.sampled_rows,
                prepared.is_run,
                prepared.drafts,
                token_ids,
                candidates,
                errors,
                log_probs,
            )
        else:
            answer = Answer(token_ids, log_probs, tuple(errors))
            if len(rows):
                self._rows.append_tokens(rows, token_ids)
        return StepOutput(
            answer.token_ids,
            answer.log_probs,
            answer.errors,
            time.perf_counter() - started,
            reports.prompt_log_probs,
            reports.tensors + traces,
            answer.num_tokens,
            answer.candidate_log_probs,
            answer.num_drafts,
            candidate_stop_words=answer.candidate_stop_words,
            logit_digests=tuple(digests.tolist()),
            is_whole=not prepared.failed_contexts,
        )

    def _run_model(
        self, prepared: PreparedStep, inputs: ForwardInputs, rows: IntArray
    ) -> tuple[Sampled | None, Reports]:
        """Run the model and sample; return None if no row samples a token."""
        is_guided = self._guides.ask(rows, [chunk.row for chunk in prepared.contexts])
        probe = self._reporter.probe(prepared)
        is_plain = probe is None and not is_guided and self._sampler.is_plain(rows)
        if self._choosing is not None and is_plain and not prepared.reports_digests:
            chosen = self._choosing.choose(inputs, self._sampler.draws(rows))
            if chosen is not None:
                return self._sampler.sample_chosen(chosen[0].numpy(), chosen[1].numpy()), Reports()
        logits = self.model.decoder.forward(inputs, probe)
        return self._sample(prepared, probe, logits, rows, is_guided=is_guided)

    def _end_pass(
        self, probe: Probe | None, prepared: PreparedStep, _: ForwardInputs, rows: IntArray
    ) -> tuple[Sampled | None, Reports]:
        """Wait for the oldest open pass and sample; return None if no row samples a token."""
        assert self._stages is not None
        is_guided = self._guides.ask(rows, [chunk.row for chunk in prepared.contexts])
        return self._sample(prepared, probe, self._stages.end(), rows, is_guided=is_guided)

    def _sample(
        self, prepared: PreparedStep, probe: Probe | None, logits: Tensor, rows: IntArray, *, is_guided: bool
    ) -> tuple[Sampled | None, Reports]:
        reports = Reports() if probe is None else self._reporter.collect(prepared, probe, logits)
        constraints = self._guides.answer() if is_guided else UNCONSTRAINED
        if not len(logits):
            return None, reports
        digests = digests_of(logits) if prepared.reports_digests else ()
        return replace(self._sampler.sample(logits, rows, constraints), digests=digests), reports

    def _copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        if self._leader is not None:
            self._leader.copy_blocks(sources, targets)
        self.kv.copy_blocks(sources, targets)

    def _with_graphs(self) -> GraphDecoder:
        """Wrap the decoders so that inputs are copied to the GPU and, for the served model, graphs are replayed."""
        share = None if self._leader is None else self._leader.communicator.share_tokens
        front = graph_decoder(self._config, self.model, self._limits, draws=self.runs_ahead, share=share)
        self.model = replace(self.model, decoder=front)
        if self._draft is not None:
            self._draft_front = graph_decoder(self._config, self._draft, self._limits)
            self._draft = replace(self._draft, decoder=self._draft_front)
        return front

    def _record(self, graphs: GraphDecoder) -> None:
        if self._leader is None:
            graphs.capture()
        else:
            self._leader.record_graphs(graphs.capture)
        if self._draft_front is not None:
            self._draft_front.capture()

    def _warm_up(self) -> WarmUpMemory:
        """On a GPU, run the largest steps and record graphs over a small pool; on a CPU, run a small step."""
        started = time.perf_counter()
        tokens_per_block = self._config.tokens_per_block
        if self._front is None:
            num_tokens = min(CPU_NUM_TOKENS, self.max_sequence_length - 1)
            self._take_blocks(-(-(num_tokens + 1) // tokens_per_block))
            memory = WarmUpMemory(self.model.device, self._pools)
            self._run_all(warm_up_steps(num_tokens, self.kv.num_blocks))
        else:
            self._take_blocks(max(self._full_batches.num_blocks, -(-self._longest_prefill // tokens_per_block) + 1))
            memory = WarmUpMemory(self.model.device, self._pools)
            self._run_largest_steps()
            memory.record(functools.partial(self._record, self._front))
            self._front.clear()
            if self._draft_front is not None:
                self._draft_front.clear()
        logger.info("warmed up in %.1f s", time.perf_counter() - started)
        return memory

    @property
    def _longest_prefill(self) -> int:
        return min(self.max_num_tokens, self.max_sequence_length - 1)

    @property
    def _full_batches(self) -> FullBatches:
        limits, config = self._limits, self._config
        return FullBatches.of(
            config.max_batch_size, limits.max_num_tokens, limits.max_sequence_length, config.tokens_per_block
        )

    def _run_largest_steps(self) -> None:
        """Run steps with the most tokens, and steps with the most sequences for each way of sampling."""
        blocks = -(-(self._longest_prefill + 1) // self._config.tokens_per_block)
        if blocks <= self.kv.num_blocks:
            self._run_all(warm_up_steps(self._longest_prefill, blocks))
        self._run_all(short_query_steps(self.max_sequence_length, self.kv.num_blocks, self._config.tokens_per_block))
        if self._full_batches.num_blocks <= self.kv.num_blocks:
            for steps in self._full_batches.runs():
                self._run_all(steps)
            if self.model.takes_lora:
                self._run_with_adapter()

    def _run_with_adapter(self) -> None:
        """Run full batches of sequences with a LoRA adapter, and with one of experts if supported, where the cache is
        large enough.
        """
        assert self._front is not None
        for of_experts in (False, True) if self._front.adapts_experts else (False,):
            adapter = zero_adapter(self.model.description, of_experts=of_experts)
            if self.adapters.size_of(adapter) <= self.adapters.device_bytes:
                ref = self.adapters.add(adapter)
                self._run_all(self._full_batches.run(GREEDY, ref))
                self.adapters.unload(ref.fingerprint)
                self.adapters.drop_unloaded()

    def _run_all(self, steps: Iterable[Step]) -> None:
        self.clear()
        for step in steps:
            self.run_step(step)
        self.clear()

    def _choose_num_blocks(self, memory: WarmUpMemory) -> int:
        models = [self.model] if self._draft is None else [self.model, self._draft]
        num_blocks = local_num_blocks(self._config, self._limits, models, memory.free_bytes())
        return num_blocks if self._leader is None else self._leader.least_num_blocks(num_blocks)

    @property
    def has_draft_model(self) -> bool:
        return self._draft is not None

    def _draft_maker(self, num_blocks: int) -> DraftModel | None:
        draft = self._draft
        if draft is None:
            return None
        kv = KvCache(draft.description, num_blocks, self._config.tokens_per_block, draft.kv_dtype, draft.device)
        self._pools.append(kv)
        return DraftModel(draft, self._rows, kv, self.max_num_tokens)

    def _take_blocks(self, num_blocks: int, store: KvStore | None = None) -> None:
        model, tokens_per_block = self.model, self._config.tokens_per_block
        # A GPU might not have space for the warm-up's pools in addition to the new ones.
        for pool in self._pools:
            pool.release()
        empty_cache(model.device)
        self.kv = KvCache(model.part, num_blocks, tokens_per_block, model.kv_dtype, model.device, store)
        self._pools = [self.kv]
        model.decoder.use_cache(self.kv)
        # Query this only once, because the call takes longer than all other overhead of a one-row step.
        self._choosing = model.decoder if isinstance(model.decoder, ChoosingDecoder) else None
        self._rows = Rows(
            self._config.max_batch_size,
            self.max_sequence_length,
            tokens_per_block,
            num_blocks,
            model.description.vocab_size,
        )
        adapters = RowAdapters(self.adapters, model.description.vocab_size, model.description.hidden_size)
        drafter = Drafter(self._rows, self._draft_maker(num_blocks))
        self._batch = InputBatch(self._rows, tokens_per_block, adapters, drafter)
        replicate = None
        if self._leader is not None and self._config.replicate_post_processors:
            replicate = self._leader.post_process
        self._sampler = Sampler(self._rows, self.post_processors, replicate, model.threads)
        self._reporter = Reporter(self._rows, model.decoder, self.output_probes)
        self._beam_stops = BeamStops(self._rows, lambda: decoder_factory(Tokenizer(self._folder.path)))
        self._guides = Guides(self._rows, lambda: GrammarProcess(self._folder))


def _rows_of(contexts: list[ContextChunk]) -> IntArray:
    return np.array([chunk.row for chunk in contexts], dtype=np.int32)


def _shared_store(config: WorkerConfig, folder: ModelFolder, model: LoadedModel) -> KvStore | None:
    """Return the store that holds the KV pool of a CPU worker with shared_kv_folder set; None for other workers."""
    if not config.shared_kv_folder or model.device.type != "cpu" or model.is_encoder:
        return None
    if model.description.latent is not None or model.description.state_size:
        logger.warning("the KV pool is not shared: latent attention and recurrent states are not supported")
        return None
    return KvStore(Path(config.shared_kv_folder), block_kind(config, folder, model), model.description.num_layers)


def _open_tiers(config: WorkerConfig, folder: ModelFolder, model: LoadedModel, kv: KvCache, *, is_whole: bool) -> None:
    """Open the tiers below the pool that are configured in the settings.

    Args:
        is_whole: Whether the pool holds all layers and heads, and there is no draft model.

    Raises:
        ConfigError: Tiers are configured where they are not supported, or a folder cannot be used.
    """
    host_folder = config.shared_kv_folder and f"{config.shared_kv_folder}/tier"
    places = [("host", "host_kv_bytes", config.host_kv_bytes, host_folder)]
    for setting in ("host_kv_bytes", "disk_kv_bytes", "disk_kv_bytes_per_s"):
        if (number := getattr(config, setting)) < 0:
            raise ConfigError(f"is {number}; must be at least 0", field=setting)
    if config.disk_kv_folder:
        places.append(("disk", "disk_kv_bytes", config.disk_kv_bytes, config.disk_kv_folder))
    places = [place for place in places if place[2]]
    seal = None if kv.store is None else kv.store.seal
    if not places:
        if seal is not None:
            kv.use_tiers(lambda pool: KvTiers((), "", pool, seal))
        return
    if not is_whole:
        raise ConfigError("requires a single rank without a draft model; set it to 0 to disable it", field=places[0][1])
    for _, setting, _, path in places:
        if not path:
            raise ConfigError("requires shared_kv_folder", field=setting)
    if config.host_kv_bytes:
        # Create shared_kv_folder, which contains the host tier's folder, as private, since it may hold pools as well.
        # If this fails, opening the tier fails, too.
        with contextlib.suppress(OSError):
            Path(config.shared_kv_folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = block_kind(config, folder, model)
    # Blocks in host memory must leave enough space for the workers' pools in the same memory.
    more: dict[str, dict[str, Any]] = {
        "host": {"unused_s": UNUSED_HOST_S, "free_bytes": partial(free_bytes, Path(config.shared_kv_folder))},
        "disk": {"max_bytes_per_s": config.disk_kv_bytes_per_s},
    }
    tiers = [TierFolder(name, Path(path), kind, kv.block_bytes, limit, **more[name]) for name, _, limit, path in places]
    num_ahead = config.kv_transfer_bytes // kv.block_bytes
    host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # Containers on one host may have different folders at the same path.
    folders = [(status.st_dev, status.st_ino) for status in (Path(place[-1]).stat() for place in places)]
    name = hashlib.blake2b(repr((host, folders, kind)).encode(), digest_size=12).hexdigest()
    kv.use_tiers(lambda pool: KvTiers(tiers, name, pool, seal, num_ahead))


def _open_transfers(
    config: WorkerConfig, folder: ModelFolder, model: LoadedModel, kv: KvCache, *, is_whole: bool
) -> None:
    """Offer blocks if this is a prefill worker, or fetch them if it is a decode worker. The arguments are those of
    `_open_tiers`. Raises ConfigError if the role is not supported here, or the address cannot be used.
    """
    if config.role == "both":
        return
    if not is_whole:
        raise ConfigError("requires a single rank without a draft model; use both", field="role")
    # Imported only here, because these need ZeroMQ and protobuf, which machines for GPU measurements lack.
    import zmq

    from gpu_worker.kv.transfer import BlockFetcher, BlockServer

    kind = kind_digest(block_kind(config, folder, model))
    if config.role == "decode":
        if config.kv_transfer_bytes < kv.block_bytes:
            reason = f"is {config.kv_transfer_bytes}; must be at least {kv.block_bytes}, the size of one KV block"
            raise ConfigError(reason, field="kv_transfer_bytes")
        kv.fetcher = BlockFetcher(kind, kv.block_bytes, config.kv_transfer_bytes, kv.store)
        return
    host, port = config.kv_transfer_host, config.kv_transfer_port
    try:
        kv.server = BlockServer(host, port, kind, kv.memory, kv.store, curve=config.curve)
    except zmq.ZMQError as error:
        raise ConfigError(f"{host}, port {port}: {error}", field="kv_transfer_host") from None
