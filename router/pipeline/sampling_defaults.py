"""Sampling parameters that the model recommends, for requests that leave them unset."""

from __future__ import annotations

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.request_checks import check_sampling

# Defaults that also apply to beam searches, which otherwise rank tokens by the unmodified distribution.
_OF_BEAMS = frozenset({"repetition_penalty"})


def sampling_defaults(model: ModelFolder) -> pb.SamplingConfig:
    """Return the sampling parameters that generation_config.json recommends. Raises ConfigError if out of range."""
    sampling = pb.SamplingConfig()
    try:
        for name, value in model.sampling_defaults.items():
            setattr(sampling, name, int(value) if name == "top_k" else value)
        check_sampling(sampling, model)
    except (InvalidArgumentError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{model.path / 'generation_config.json'}: {error}; use --generation-config none to ignore it",
            field="model",
        ) from None
    return sampling


def fill_sampling(sampling: pb.SamplingConfig, defaults: pb.SamplingConfig) -> None:
    """Set each unset field that has a default."""
    is_beam_search = sampling.beam_width > 1
    own = {field.name for field, _ in sampling.ListFields()}
    for field, value in defaults.ListFields():
        if field.name not in own and (not is_beam_search or field.name in _OF_BEAMS):
            setattr(sampling, field.name, value)
