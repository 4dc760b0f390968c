"""A rank other than 0, which executes rank 0's commands.

For each command the main thread receives a frame, decodes it, and executes it on this rank's part of the model;
collective operations synchronize it with the other ranks. A follower keeps no rows and does not sample.
"""

from __future__ import annotations

import logging
import signal

import numpy as np
import torch

from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.device_memory import WarmUpMemory, empty_cache
from gpu_worker.kv.cache import KvCache
from gpu_worker.limits import Limits, graph_decoder, local_num_blocks, may_run_ahead
from gpu_worker.lora.adapter import Adapter, LoraPair
from gpu_worker.models.loader import LoadedModel, load_model, num_threads
from gpu_worker.parallel.commands import decode_adapter_layer, decode_forward, decode_post_process
from gpu_worker.parallel.group import RankGroup
from gpu_worker.parallel.pipeline import PipelineDecoder
from gpu_worker.parallel.rank_monitor import LOST_EXIT_CODE
from gpu_worker.parallel.shard_adapters import adapter_part
from gpu_worker.sampling.post_processors import Call, PostProcessor, apply, load_post_processors
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder
from protos import ranks_pb2

logger = logging.getLogger(__name__)

_STALL_S = 30.0


class RankExecutor:
    """Holds one rank's part of the model, and executes commands on it."""

    def __init__(
        self, config: WorkerConfig, folder: ModelFolder, group: RankGroup, model: LoadedModel | None = None
    ) -> None:
        """Load this rank's part of the model unless it is given. Raises ConfigError if the model folder or a setting is
        wrong, or UnsupportedError if the model cannot be sharded.
        """
        torch.set_num_threads(num_threads(config))
        self._config, self._communicator = config, group.communicator
        self.model: LoadedModel = model or load_model(config, folder, group.communicator)
        self._limits = Limits.of(config, folder, self.model)
        self._graphs: GraphDecoder | None = None
        self._decoder = self.model.decoder
        if self.model.device.type == "cuda" or may_run_ahead(config, self.model):
            share = group.communicator.share_tokens
            self._graphs = self._decoder = graph_decoder(config, self.model, self._limits, share=share)
        self._kv: KvCache | None = None
        self._memory: WarmUpMemory | None = None
        self._has_chosen = False
        self._post_processors: dict[str, PostProcessor] = {}
        if config.replicate_post_processors and self._communicator.ranks.stage == 0:
            self._post_processors = load_post_processors(config.logits_post_processors)
        self._adapters: dict[int, object] = {}
        self._arriving: list[dict[str, LoraPair]] = []

    @torch.inference_mode()
    def execute(self, command: ranks_pb2.RankCommand) -> None:
        """Execute any command except StopRank."""
        kind = command.WhichOneof("command")
        if kind == "forward":
            self._forward(command.forward)
        elif kind == "end_pass":
            self._end_pass()
        elif kind == "join_logits":
            self._join_logits(command.join_logits.num_rows)
        elif kind == "copy_blocks":
            assert self._kv is not None
            sources, targets = command.copy_blocks.sources, command.copy_blocks.targets
            self._kv.copy_blocks(np.array(sources, dtype=np.int32), np.array(targets, dtype=np.int32))
        elif kind == "post_process":
            self._post_process(decode_post_process(command.post_process))
        elif kind == "adapter_layer":
            self._take_adapter_layer(command.adapter_layer)
        elif kind == "choose_num_blocks":
            self._choose_num_blocks()
        elif kind == "use_cache":
            self._use_cache(command.use_cache.num_blocks)
        elif kind == "record_graphs":
            self._record_graphs()
        else:
            raise ValueError(f"rank 0 sent the unknown command {kind!r}")

    def close(self) -> None:
        """Release recorded graphs; call it before the ranks disconnect."""
        if self._graphs is not None:
            self._graphs.close()

    def _forward(self, forward: ranks_pb2.ForwardPass) -> None:
        for number in forward.dropped_adapters:
            del self._adapters[number]
        inputs, probe = decode_forward(forward, self._adapters)
        if forward.is_open:
            assert isinstance(self._decoder, PipelineDecoder)
            self._decoder.begin(inputs, probe)
        else:
            self._decoder.forward(inputs, probe)

    def _end_pass(self) -> None:
        if self._communicator.ranks.stage == 0:
            assert isinstance(self._decoder, PipelineDecoder)
            self._decoder.end()

    def _use_cache(self, num_blocks: int) -> None:
        model = self.model
        if self._kv is not None:
            self._kv.release()
            empty_cache(model.device)
        self._kv = KvCache(model.part, num_blocks, self._config.tokens_per_block, model.kv_dtype, model.device)
        self._decoder.use_cache(self._kv)
        # The first pool is used for the warm-up.
        if self._memory is None and not self._has_chosen:
            self._memory = WarmUpMemory(model.device, [self._kv])

    def _choose_num_blocks(self) -> None:
        assert self._memory is not None
        self._memory.end_steps()
        if self._graphs is not None:
            self._graphs.clear()
        self._communicator.least(local_num_blocks(self._config, self._limits, [self.model], self._memory.free_bytes()))
        self._memory, self._has_chosen = None, True

    def _record_graphs(self) -> None:
        """Record graphs: during the warm-up to measure their memory, and later to use them."""
        assert self._graphs is not None
        if self._memory is None:
            self._graphs.capture()
        else:
            self._memory.record(self._graphs.capture)

    def _join_logits(self, num_rows: int) -> None:
        if self._communicator.ranks.stage == 0:
            description = self.model.description
            rows = torch.empty(num_rows, description.hidden_size, dtype=self.model.dtype, device=self.model.device)
            self._communicator.share(rows)
            self._decoder.logits(rows)

    def _post_process(self, call: Call) -> None:
        if self._communicator.ranks.stage == 0:
            shape = (len(call.tokens), self.model.description.vocab_size)
            logits = torch.empty(shape, dtype=torch.float32, device=self.model.device)
            self._communicator.share(logits)
            apply(self._post_processors[call.name], call, logits)

    def _take_adapter_layer(self, layer: ranks_pb2.AdapterLayer) -> None:
        self._arriving.append(decode_adapter_layer(layer))
        if layer.is_last:
            whole = Adapter("", str(layer.adapter), tuple(self._arriving))
            self._adapters[layer.adapter] = self._decoder.place_adapter(adapter_part(whole, self.model.shard))
            self._arriving = []


def follow(config: WorkerConfig, folder: ModelFolder, group: RankGroup) -> int:
    """Run a rank other than 0 until its group ends; return the exit code. Raises ConfigError if the model folder or a
    setting is wrong, or UnsupportedError if the model cannot be sharded.
    """
    # Imported here because the GPU benchmarks run without gRPC and prometheus-client.
    from midstream.rpc.health import Progress
    from midstream.telemetry import HttpServer, Metrics

    executor = RankExecutor(config, folder, group)
    metrics, progress = Metrics(), Progress()
    loop = progress.loop("compute", _STALL_S)
    commands = metrics.counter("worker_rank_commands", "Commands from rank 0 that were executed.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: group.monitor.ask_drain())
    http = HttpServer(config.host, config.http_port, metrics, progress.problems)
    http.start()
    logger.info("ready", extra={"http_port": http.port})
    while True:
        loop.idle()
        command = ranks_pb2.RankCommand.FromString(group.receive())
        loop.touch()
        if command.HasField("stop"):
            break
        executor.execute(command)
        commands.inc()
    http.stop()
    executor.close()
    group.close()
    logger.info("stopped: rank 0 stopped the group")
    return int(command.stop.exit_code)


def run_follower(config: WorkerConfig, folder: ModelFolder, group: RankGroup) -> int:
    """Run `follow`. On a failure after the start, end the process immediately, which also ends the group."""
    try:
        return follow(config, folder, group)
    except OSError as error:
        group.fail(str(error))
    except RuntimeError as error:  # torch raises this when another rank has left a collective operation
        logger.exception("a command failed")
        group.fail(str(error))
    return LOST_EXIT_CODE
