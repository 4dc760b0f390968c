"""A pipeline stage: some of the layers, between the previous and the next stage.

In each step the first stage looks up embeddings, each stage runs its layers and sends the output to the next one, and
the last stage sends the sampled rows back to the first, which computes the logits. Only the first stage therefore holds
the vocabulary, and requested logits and hidden states end up on the rank that reports them.

The first stage may begin the next passes before it completes one, so that all stages compute at the same time.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter
from gpu_worker.models.decoder import Decoder, ForwardInputs, PartDecoder, Probe
from gpu_worker.models.description import DecoderDescription
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import stage_layers


class StageCommunicator(Protocol):
    """Communication with the corresponding ranks of other stages."""

    def send(self, x: Tensor, stage: int) -> None:
        """Send `x`, which must not be modified afterwards."""

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Return a received tensor with the shape, type and device of `like`."""


class GroupCommunicator(StageCommunicator, Protocol):
    """Communication of a rank with all other stages."""

    ranks: Ranks
    device: torch.device


def as_stage(
    part: PartDecoder, description: DecoderDescription, communicator: GroupCommunicator, dtype: torch.dtype
) -> Decoder:
    """Return a rank's part of the model as a decoder, which is `part` itself if there is only one stage."""
    ranks = communicator.ranks
    if ranks.pipeline_size == 1:
        return part
    hidden = torch.empty(0, description.hidden_size, dtype=dtype, device=communicator.device)
    return PipelineDecoder(part, stage_layers(description, ranks.pipeline_size), ranks.stage, communicator, hidden)


class PipelineDecoder:
    """A decoder whose layers are split across stages."""

    def __init__(
        self, part: PartDecoder, layers: list[range], stage: int, communicator: StageCommunicator, hidden: Tensor
    ) -> None:
        """Wrap this stage's part of the model.

        Args:
            hidden: An empty tensor [0, hidden_size] with the type and device of the activations sent between stages.
        """
        self._part, self._layers, self._stage, self._communicator = part, layers, stage, communicator
        self._hidden = hidden
        self._last_stage = len(layers) - 1
        self._open: deque[tuple[ForwardInputs, Probe | None]] = deque()

    def place_adapter(self, adapter: Adapter) -> object:
        """Convert a part of a LoRA adapter to the form that `ForwardInputs.adapters` takes."""
        return self._part.place_adapter(adapter)

    def use_cache(self, kv: KvCache) -> None:
        self._part.use_cache(kv)

    def logits(self, last: Tensor) -> Tensor:
        """Return float32 logits [N, vocab_size] for outputs of the last layer. Only works on the first stage."""
        return self._part.logits(last)

    def forward(self, inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        """Run this stage's layers; return logits [S, vocab_size] on the first stage, [S, 0] on others."""
        self.begin(inputs, probe)
        return self.end() if self._stage == 0 else torch.empty(len(inputs.sampled), 0, device=self._hidden.device)

    def begin(self, inputs: ForwardInputs, probe: Probe | None = None) -> None:
        """Run this stage's layers; the first stage must call `end` later, once for each pass, in the same order."""
        if self._stage == 0:
            self._open.append((inputs, probe))
            hidden = self._part.embed(inputs)
        else:
            hidden = self._communicator.receive(self._rows(inputs.token_ids), self._stage - 1)
        hidden = self._part.run_layers(hidden, inputs, probe)
        if self._stage < self._last_stage:
            self._communicator.send(hidden, self._stage + 1)
        if self._stage == 0:
            return
        if probe is not None:
            for layer in self._kept(probe, self._stage):
                self._communicator.send(probe.states[layer], 0)
        if self._stage == self._last_stage and (probe is not None or len(inputs.sampled)):
            self._communicator.send(hidden if probe is not None else hidden[inputs.sampled.long()], 0)

    @property
    def num_open(self) -> int:
        """Number of passes that the first stage has begun and not completed."""
        return len(self._open)

    def end(self) -> Tensor:
        """Complete the first stage's oldest pass: wait for the hidden states that are sent back; return the logits."""
        inputs, probe = self._open.popleft()
        if probe is None:
            rows = self._rows(inputs.sampled)
            return self._part.logits(self._communicator.receive(rows, self._last_stage) if len(rows) else rows)
        for stage in range(1, self._last_stage + 1):
            for layer in self._kept(probe, stage):
                probe.states[layer] = self._communicator.receive(self._rows(inputs.token_ids), stage)
        probe.last = self._communicator.receive(self._rows(inputs.token_ids), self._last_stage)
        return self._part.logits(probe.last[inputs.sampled.long()])

    def _kept(self, probe: Probe, stage: int) -> list[int]:
        layers = self._layers[stage]
        return sorted(probe.layers & {*range(layers.start + 1, layers.stop + 1)})

    def _rows(self, places: Tensor) -> Tensor:
        return self._hidden.new_empty(len(places), self._hidden.shape[1])
