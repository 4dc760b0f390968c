"""docs/models.md: the supported model families, as shown by `midstream models`."""

from __future__ import annotations

from pathlib import Path

from midstream.model.families import HEADINGS, rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models

The families of models that are served, and how; `midstream models` shows the same table. The page is generated from
`midstream/model/families.py` by `python -m tests.features`. Tests run each family as a tiny random model against
transformers: our own code in `tests/gpu_worker/test_families.py`, transformers' code in
`tests/gpu_worker/test_transformers_model.py`.

On a CPU, families in "CPU kernels" run by the C++ kernels and the others in PyTorch operations, more slowly. On a GPU
all of our own code runs by Triton kernels, but for recurrent layers, whose state is kept with the KV blocks
([decision](decisions/recurrent-state.md)). Experts take no LoRA adapters. Other causal language models run by
transformers' code where it hands its attention out; [gpu.md](gpu.md) says what is refused, [features.md](features.md)
what requests may use.

"""


def page() -> str:
    """Return docs/models.md."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        "| --- " * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return _HEAD + "\n".join(lines) + "\n"
