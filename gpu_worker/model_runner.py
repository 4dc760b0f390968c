"""Runs steps on a model: rows and tensors in, tokens out. Knows neither sockets nor protobuf."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import torch

from gpu_worker.cuda_graphs import GraphDecoder, GraphRecorder
from gpu_worker.input_batch import InputBatch
from gpu_worker.kv_cache import KvCache, block_bytes, choose_num_blocks
from gpu_worker.loader import LoadedModel, load_model, num_threads
from gpu_worker.rows import Rows
from gpu_worker.sampler import Sampler
from gpu_worker.step import GREEDY, NewSequence, RowLogProbs, Step, StepOutput
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, MidstreamError
from midstream.model_folder import ModelFolder

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16
# Large enough to use the machine, small enough that a step's decodes do not wait long for its prefills.
_CPU_NUM_TOKENS, _GPU_NUM_TOKENS = 256, 2048


class ModelRunner:
    """A loaded model with its KV pool and the rows of the sequences on it.

    Attributes:
        model: The loaded model.
        kv: Its KV pool.
        max_sequence_length: Prompt and output together, in tokens.
        max_num_tokens: Tokens in one step.
    """

    def __init__(self, config: WorkerConfig, folder: ModelFolder, model: LoadedModel | None = None) -> None:
        """Loads the model unless it is given, warms it up, and takes memory for the KV pool.

        Raises:
            ConfigError: The folder or a setting is wrong.
            UnsupportedError: The model's architecture is not known here.
        """
        torch.set_num_threads(num_threads(config))
        self.model: LoadedModel = model or load_model(config, folder)
        self.max_sequence_length = config.max_sequence_length or folder.max_sequence_length
        if self.max_sequence_length > self.model.description.max_sequence_length:
            raise ConfigError(
                f"{self.max_sequence_length} is more than the model's {self.model.description.max_sequence_length}",
                field="max_sequence_length",
            )
        self._config = config
        default = _CPU_NUM_TOKENS if self.model.device.type == "cpu" else _GPU_NUM_TOKENS
        self.max_num_tokens = config.max_num_tokens or default
        graphs = self._with_graphs() if self.model.device.type == "cuda" else None
        self._warm_up()
        self._take_blocks(self._choose_num_blocks())
        if graphs is not None:
            graphs.capture()

    def clear(self) -> None:
        """Forgets all sequences; the pool's contents stay as they are, and nothing refers to them."""
        self._batch.clear()

    @torch.inference_mode()
    def run_step(self, step: Step) -> StepOutput:
        """Executes one step.

        Raises:
            ExecutionError: The step contradicts what came before it; call `clear` before the next.
        """
        started = time.perf_counter()
        prepared = self._batch.prepare(step)
        if len(step.copy_sources):
            self.kv.copy_blocks(step.copy_sources, step.copy_targets)
        rows, is_run = prepared.sampled_rows, prepared.is_run
        token_ids = np.zeros(len(rows), dtype=np.int32)
        errors: list[tuple[int, MidstreamError]] = []
        log_probs: tuple[RowLogProbs, ...] = ()
        if prepared.inputs is not None:
            logits = self.model.decoder.forward(prepared.inputs)
            if len(logits):
                run_rows = rows[is_run]
                sampled = self._sampler.sample(logits, run_rows)
                token_ids[is_run] = sampled.token_ids
                log_probs = sampled.log_probs
                errors += [(int(run_rows[place]), error) for place, error in sampled.errors]
        if not is_run.all():
            errors += [(row, self._rows.failed[row]) for row in rows[~is_run].tolist()]
        if len(rows):
            self._rows.append_tokens(rows, token_ids)
        return StepOutput(token_ids, log_probs, tuple(errors), time.perf_counter() - started)

    def _with_graphs(self) -> GraphDecoder:
        """Puts the decoder behind one that copies inputs to the GPU and replays graphs."""
        graphs = GraphDecoder(
            self.model.decoder,
            self.model.device,
            max_batch_size=self._config.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_blocks=-(-self.max_sequence_length // self._config.tokens_per_block),
            recorder=GraphRecorder() if self._config.cuda_graphs else None,
        )
        self.model = replace(self.model, decoder=graphs)
        return graphs

    def _warm_up(self) -> None:
        """Runs the largest step on a GPU, so that what is free afterwards stays free; a small one on a CPU."""
        is_gpu = self.model.device.type == "cuda"
        num_tokens = self.max_num_tokens if is_gpu else _WARM_UP_TOKENS
        num_tokens = min(num_tokens, self.max_sequence_length - 1)
        self._take_blocks(-(-(num_tokens + 1) // self._config.tokens_per_block))
        tokens = np.zeros(num_tokens, dtype=np.int32)
        sequence = NewSequence(
            row=0,
            token_ids=tokens,
            num_prompt_tokens=num_tokens,
            block_ids=np.arange(self.kv.num_blocks, dtype=np.int32),
            sampling=GREEDY,
        )
        one, zero = np.array([num_tokens], dtype=np.int32), np.zeros(1, dtype=np.int32)
        started = time.perf_counter()
        self.run_step(Step(new_sequences=(sequence,), context_rows=zero, context_starts=zero, context_lengths=one))
        self.run_step(Step(generation_rows=zero))
        logger.info("warmed up in %.1f s", time.perf_counter() - started)

    def _choose_num_blocks(self) -> int:
        config = self._config
        return choose_num_blocks(
            block_bytes(self.model.description, config.tokens_per_block, self.model.kv_dtype),
            config.tokens_per_block,
            free_memory_fraction=config.free_memory_fraction,
            max_kv_tokens=config.max_kv_tokens,
            max_useful_tokens=config.max_batch_size * self.max_sequence_length,
            device=self.model.device,
        )

    def _take_blocks(self, num_blocks: int) -> None:
        model, tokens_per_block = self.model, self._config.tokens_per_block
        self.kv = KvCache(model.description, num_blocks, tokens_per_block, model.kv_dtype, model.device)
        model.decoder.use_cache(self.kv)
        self._rows = Rows(
            self._config.max_batch_size,
            self.max_sequence_length,
            tokens_per_block,
            num_blocks,
            model.description.vocab_size,
        )
        self._batch = InputBatch(self._rows, tokens_per_block)
        self._sampler = Sampler(self._rows)
