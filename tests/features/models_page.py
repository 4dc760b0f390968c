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

On a CPU, families marked "CPU kernels" use the C++ kernels; the others use PyTorch operations, which are slower. On a
GPU, all our own model code runs on Triton kernels, except recurrent layers, whose state is kept with the KV blocks
([decision](decisions/recurrent-state.md)). Experts do not support LoRA adapters. Other causal language models run with
transformers' code if it uses transformers' attention interface; [gpu.md](gpu.md) says which models are rejected,
[features.md](features.md) which features requests may use.

"""


def page() -> str:
    """Return docs/models.md."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        "| --- " * len(HEADINGS) + "|",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return _HEAD + "\n".join(lines) + "\n"
