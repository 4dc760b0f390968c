"""A small random model whose output consists of words, emoji and Chinese; a token may be only part of a character."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.tokenizer import Tokenizer
from tests.gpu_worker.tiny_models import SHAPE, auto_class

# Any token can follow any other token. Most characters here take two or three tokens.
_TEXT = "so the stream goes on and on, never lost. 😀 🎉 🫠 🚀 日本語 漢字 東京 你好 naïve Grüße"


def make_small_model(folder: Path, family: str = "Llama", **settings: Any) -> ModelFolder:
    """Write a model of `family` into an empty folder, with the tokenizer of the embedded model.

    It is a classifier if the settings have `num_labels`.
    """
    embedded = open_model_folder("smollm2")
    torch.manual_seed(7)
    shape = SHAPE | {"vocab_size": embedded.vocab_size, "eos_token_id": embedded.end_ids[0]}
    if family == "Llama":
        shape["num_hidden_layers"] = 2
    config_class = getattr(transformers, f"{family}Config")
    if "text_config" in config_class.sub_configs:
        settings["text_config"] = shape | settings["text_config"]
        config = config_class(**settings)
    else:
        config = config_class(**(shape | settings))
    is_classifier = "num_labels" in settings
    auto: Any = transformers.AutoModelForSequenceClassification if is_classifier else auto_class(family)
    model = auto.from_config(config).eval()
    spoken = sorted(set(Tokenizer(embedded.path).encode(_TEXT)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that the output depends on the whole context.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
        if not is_classifier and not config.get_text_config().tie_word_embeddings:
            head = torch.zeros_like(model.lm_head.weight)
            head[spoken] = torch.randn(len(spoken), head.shape[1])
            model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path / name, folder / name)
    return open_model_folder(str(folder))
