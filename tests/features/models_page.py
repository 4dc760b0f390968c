"""Generates docs/models.md: the supported model families, as shown by `midstream models`."""

from __future__ import annotations

from pathlib import Path

from midstream.model.families import HEADINGS, rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models

This page lists the supported families of models; `midstream models` shows the same table. It is generated from
`midstream/model/families.py` by `python -m tests.features`. Tests compare each family, as a tiny random model, with
transformers: our own implementation in `tests/gpu_worker/test_families.py`, and the transformers implementation in
`tests/gpu_worker/test_transformers_model.py`. For our own implementation, the logits are within 1e-4 of those of
transformers (relative to the largest logit), and tests show that their bits do not change if the prompt is computed in
chunks of 1, 7 or 64 tokens, in a batch of 32 sequences, or with a cached prefix, or if the worker is lost at any step.
Some types are tested briefly by default, and completely with `TEST_ALL_FAMILIES=1`.

On a CPU, families marked "CPU kernels" use the C++ kernels; the others use PyTorch operations, which are slower. On a
GPU, our own implementation uses Triton kernels, except for recurrent layers, whose state is stored with the KV blocks
([decision](decisions/recurrent-state.md)). LoRA adapters of experts need `--kernels torch` on a CPU
([lora.md](lora.md)). Other causal language models run with the transformers implementation if it uses transformers'
attention interface; [gpu.md](gpu.md) lists the models that are rejected, and [features.md](features.md) the features
that requests may use.

"""


def page() -> str:
    """Return the text of docs/models.md."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        "| --- " * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return _HEAD + "\n".join(lines) + "\n"
