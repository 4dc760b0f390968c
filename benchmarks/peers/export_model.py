"""Write the embedded model as a Hugging Face folder of bf16 safetensors for the peers. It is run as a separate program:

python export_model.py MODEL_FOLDER OUTPUT

The weights are those of the GGUF file, dequantized and rounded to bf16, so that all peers run the same model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export(source: Path, target: Path) -> None:
    """Write `target` from `source`, which is a model folder with model.gguf."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
