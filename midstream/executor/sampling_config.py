"""TensorRT-LLM's `SamplingConfig`, with its ranges and defaults, and the conversion to the service's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.client.request import set_fields
from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb

MAX_BEAM_WIDTH = 1024
DEFAULT_SEED = 0
DEFAULT_MIN_TOKENS = 1
_NO_LIMIT = 1 << 20  # n-grams of this size cannot occur twice
_SMALLEST = 1e-37  # stands for a minimum of 0, which is excluded by the service

# (lower bound, whether it is excluded, upper bound)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "beam_width": (1, False, MAX_BEAM_WIDTH),
    "top_k": (0, False, math.inf),
    "top_p": (0, False, 1),
    "top_p_min": (0, False, 1),
    "top_p_reset_ids": (0, False, math.inf),
    "top_p_decay": (0, True, 1),
    "seed": (0, False, 2**64 - 1),
    "temperature": (0, False, math.inf),
    "min_tokens": (0, False, math.inf),
    "beam_search_diversity_rate": (0, False, math.inf),
    "repetition_penalty": (0, True, math.inf),
    "early_stopping": (0, False, math.inf),
    "no_repeat_ngram_size": (0, False, math.inf),
    "num_return_sequences": (1, False, math.inf),
    "min_p": (0, False, 1),
}


@dataclass(slots=True)
class SamplingConfig:
    """Sampling parameters. None means the default of TensorRT-LLM, which is given in docs/executor.md: greedy sampling
    unless `top_k` or `top_p` is set.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None
    beam_width_array: Sequence[int] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        check_range(name, value)
        if name == "num_return_sequences" and value is not None and 1 < self.beam_width < int(str(value)):
            raise InvalidArgumentError("must be at most the beam width", field=name)
        object.__setattr__(self, name, value)

    @property
    def num_return_beams(self) -> int:
        """Number of beams to return: `num_return_sequences` in a beam search, otherwise the beam width."""
        return min(self.num_return_sequences or self.beam_width, self.beam_width)

    def fill(self, sampling: pb.SamplingConfig) -> None:
        """Set the service's fields, so that unset ones have TensorRT-LLM's defaults.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
            UnsupportedError: The beam width varies.
        """
        if self.beam_width_array and set(self.beam_width_array) != {self.beam_width}:
            raise UnsupportedError("beam widths cannot vary; set beam_width", field="beam_width_array")
        fill_choice(sampling, self.beam_width, self.top_k, self.top_p, self.min_p, self.temperature)
        fill_penalties(
            sampling, self.temperature, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )
        set_fields(
            sampling,
            top_p_min=None if self.top_p_min is None else max(self.top_p_min, _SMALLEST),
            top_p_reset_id=self.top_p_reset_ids,
            top_p_decay=self.top_p_decay,
            seed=DEFAULT_SEED if self.seed is None else self.seed,
            min_tokens=DEFAULT_MIN_TOKENS if self.min_tokens is None else self.min_tokens,
            beam_search_diversity_rate=self.beam_search_diversity_rate,
            length_penalty=self.length_penalty,
            early_stopping=None if self.early_stopping is None else int(self.early_stopping),
            no_repeat_ngram_size=ngram_size(self.no_repeat_ngram_size),
            num_return_sequences=self.num_return_sequences,
        )


def check_range(name: str, value: object) -> None:
    """Raise InvalidArgumentError if a value is not in TensorRT-LLM's range of its parameter."""
    bounds = _RANGES.get(name)
    if value is None or bounds is None or not isinstance(value, int | float):
        return
    low, excludes_low, high = bounds
    if not (low < value if excludes_low else low <= value) or value > high:
        start = f"above {low:g}" if excludes_low else f"at least {low:g}"
        end = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidArgumentError(f"is {value}; must be {start}{end}", field=name)


def fill_choice(
    sampling: pb.SamplingConfig,
    beam_width: int,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    temperature: float | None,
) -> None:
    """Set how a token is chosen: without `top_k` and `top_p`, the most likely one."""
    # Every field is set, since the service completes others from the model's generation_config.json.
    is_greedy = beam_width == 1 and not top_k and not top_p
    set_fields(
        sampling,
        beam_width=beam_width,
        temperature=1.0 if temperature is None else temperature,
        top_k=1 if is_greedy else None if beam_width > 1 else top_k or 0,
        top_p=None if beam_width > 1 else top_p or 1.0,
        min_p=min_p or 0.0,
    )


def fill_penalties(
    sampling: pb.SamplingConfig,
    temperature: float | None,
    repetition: float | None,
    presence: float | None,
    frequency: float | None,
) -> None:
    """Set the penalties, which TensorRT-LLM applies to the prompt's tokens too, and after the temperature."""
    # The service divides by the temperature last: (x - p * t) / t = x / t - p. Repetition scales, in any order.
    scale = temperature or 1.0
    set_fields(
        sampling,
        repetition_penalty=1.0 if repetition is None else repetition,
        presence_penalty=presence * scale if presence else None,
        frequency_penalty=frequency * scale if frequency else None,
        penalize_prompt=True if presence or frequency else None,
    )


def ngram_size(size: int | None) -> int:
    """Return the service's size for one of TensorRT-LLM, whose default, 2^30, means no limit."""
    return 0 if size is None or size >= _NO_LIMIT else size
