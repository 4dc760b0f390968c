"""A small random Llama whose output is words, emoji and Chinese, in pieces of characters."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer

# Every token that one of these takes can follow any other; most characters here take two or three tokens.
_TEXT = "so the stream goes on and on, never lost. 😀 🎉 🫠 🚀 日本語 漢字 東京 你好 naïve Grüße"


def make_small_model(folder: Path) -> ModelFolder:
    """Lays the model down in an empty folder, with the embedded model's tokenizer."""
    embedded = open_model_folder("smollm2")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=embedded.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=embedded.end_ids[0],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    spoken = sorted(set(Tokenizer(embedded.path).encode(_TEXT)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at the start of training, so that what it says depends on all that went before.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
        head = torch.zeros_like(model.lm_head.weight)
        head[spoken] = torch.randn(len(spoken), config.hidden_size)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path / name, folder / name)
    return open_model_folder(str(folder))
