"""The table in docs/models.md that says how each family is verified, made from what the tests run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers

from benchmarks.gpu import model as benchmarked
from midstream.model.families import SERVED_FAMILIES, ServedFamily
from midstream.model.folder import EMBEDDED_MODEL, open_model_folder
from tests.gpu_worker import test_families, test_transformers_model
from tests.gpu_worker.encoder_models import ENCODERS
from tests.gpu_worker.vision_model import CASES

HEADINGS = ("family", "tiny random model, CPU", "images, CPU", "Triton's interpreter", "real weights, CPU", "GPU")
_REAL, _NOT_YET = "SmolLM2-135M-Instruct", "no"


def _types(names: Iterable[str]) -> set[str]:
    """Return the values of `model_type` of transformers' families."""
    return {getattr(transformers, f"{name}Config").model_type for name in names}


def _types_of(models: dict[str, tuple[str, dict[str, Any]]]) -> set[str]:
    return _types(name for name, _ in models.values())


_MARK = test_families.test_triton_kernels_under_the_decoder_give_the_same_logits.pytestmark[0]  # type: ignore[attr-defined]
# What is compared with transformers, from the most to the least; the first that has a type of the family applies.
_ON_CPU = {
    "everything": _types_of(test_families.MODELS),
    "logits": set(test_families.OTHER_TYPES),
    "logits, batches, captured steps": _types_of(test_transformers_model.FAMILIES),
    "vectors, scores, batches": _types(ENCODERS),
}
_INTERPRETED = _types(test_families.MODELS[name][0] for name, _ in _MARK.args[1])
_WITH_IMAGES = _types(case.family for case in CASES.values())
_ON_GPU = {
    value["model_type"] for value in vars(benchmarked).values() if isinstance(value, dict) and "model_type" in value
}


def _row(family: ServedFamily) -> tuple[str, ...]:
    types = set(family.types)
    on_cpu = next((name for name, tested in _ON_CPU.items() if types & tested), _NOT_YET)
    is_real = open_model_folder(EMBEDDED_MODEL).architecture in types
    return (
        family.title,
        on_cpu,
        "logits, tokens" if types & _WITH_IMAGES else _NOT_YET,
        "logits" if types & _INTERPRETED else _NOT_YET,
        _REAL if is_real else _NOT_YET,
        "random weights" if types & _ON_GPU else _NOT_YET,
    )


def rows() -> list[tuple[str, ...]]:
    """Return a row for each family, with the columns HEADINGS."""
    return [_row(family) for family in SERVED_FAMILIES]
