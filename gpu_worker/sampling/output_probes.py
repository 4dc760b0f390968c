"""Output probes: user code that computes a tensor for each token of a forward pass, reported under the probe's name.

A package registers a probe in the entry point group `midstream.output_probes`, as a class that is derived from
OutputProbe and has a constructor without arguments. A request names it in `output.additional_outputs`.

If a probe raises an exception or returns a tensor of the wrong type or shape, the request for which it was called
fails.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

from torch import Tensor

from gpu_worker.batch.step import Step
from midstream.errors import ConfigError, ExecutionError, InvalidArgumentError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "midstream.output_probes"
_FIELD = "output.additional_outputs.name"
_MAX_WIDTH = 1 << 20


class OutputProbe(ABC):
    """Computes a tensor for each position of a forward pass.

    Attributes:
        width: Number of values per position.
        layers: Hidden states that it reads: 0 is the embeddings, i the output of layer i; the last layer's output is
            normed.
        of_sequence: Whether `states` has all positions of a sequence in the pass, for one row of the output. Only
            encoders have such probes, whose passes contain whole sequences.
    """

    width: ClassVar[int]
    layers: ClassVar[Sequence[int]] = ()
    of_sequence: ClassVar[bool] = False

    @abstractmethod
    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        """Return float32 [positions, width]; no row may depend on other rows.

        Args:
            states: Float32 [positions, hidden size] of each of `layers`.
            logits: Float32 [positions, vocabulary]: the model's logits, unmodified.
        """


class ClassScores(OutputProbe):
    """The scores of the classes of a classification head, which are the logits of the first tokens."""

    def __init__(self, num_labels: int) -> None:
        self.width = num_labels  # type: ignore[misc]

    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        """Return float32 [positions, number of classes]."""
        return logits[:, : self.width]


def load_output_probes(num_layers: int) -> dict[str, OutputProbe]:
    """Return the probes of all installed packages, by name. Raises ConfigError if a probe cannot be loaded, is not an
    OutputProbe, or reads a layer that the model lacks.
    """
    return {item.name: _load(item, num_layers) for item in entry_points(group=ENTRY_POINT_GROUP)}


def _load(entry_point: EntryPoint, num_layers: int) -> OutputProbe:
    place = f"{entry_point.name!r} under {ENTRY_POINT_GROUP}"
    try:
        probe = entry_point.load()()
    except Exception as error:
        raise ConfigError(f"{place} does not load: {error}") from error
    if not isinstance(probe, OutputProbe):
        raise ConfigError(f"{place} is a {type(probe).__name__}, not an output probe")
    if not isinstance(probe.width, int) or not 1 <= probe.width <= _MAX_WIDTH:
        raise ConfigError(f"{place}: its width must be in 1..{_MAX_WIDTH}")
    if not all(0 <= layer <= num_layers for layer in probe.layers):
        raise ConfigError(f"{place} reads layers {list(probe.layers)}; the model has 0..{num_layers}")
    return probe


def refuse_unknown_probes(step: Step, known: Collection[str]) -> Step:
    """Fail sequences that request a probe which is not installed on this worker."""
    if all(name in known for new in step.new_sequences for name, _ in new.outputs.probes):
        return step
    error = InvalidArgumentError("is not installed on this worker", field=_FIELD)
    news = (
        new if all(name in known for name, _ in new.outputs.probes) else replace(new, error=error)
        for new in step.new_sequences
    )
    return replace(step, new_sequences=tuple(news))


def run_probe(name: str, probe: OutputProbe, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
    """Return the output of a probe. Raises ExecutionError if the probe failed, or returned the wrong type or shape."""
    shape = (len(logits), probe.width)
    try:
        values = probe.compute(states, logits)
        if not isinstance(values, Tensor) or values.shape != shape or not values.is_floating_point():
            described = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"it returned {described}; must be float32 {list(shape)}")
    except Exception as error:  # noqa: BLE001 (user code)
        logger.warning("the output probe %s failed: %r", name, error)
        message = f"the output probe {name!r} failed: {type(error).__name__}: {error}"
        raise ExecutionError(message[:500], field=_FIELD) from None
    return values
