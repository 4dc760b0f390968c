"""Tiny random vision-language models with a byte-level tokenizer, and images for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# An image of up to TILE pixels in each direction is one tile; a larger one is scaled to SIZE pixels and divided into
# tiles.
TILE, SIZE, TOKENS_PER_TILE = 32, 64, 4
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def make_vision_model(folder: Path, family: str = "Idefics3") -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    """Write a random model of `family` (Idefics3 or SmolVLM) to `folder`; return transformers' model and tokenizer."""
    torch.manual_seed(3)
    tokenizer = _tokenizer()
    config = getattr(transformers, f"{family}Config")(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<end_of_utterance>"),
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 8,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model: Any = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that the output depends on the image.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    image_processor(family).save_pretrained(folder)
    return model, tokenizer


def image_processor(family: str = "Idefics3") -> Any:
    """Return transformers' image processor of the tiny models."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kind = {"Idefics3": Idefics3ImageProcessorPil, "SmolVLM": SmolVLMImageProcessorPil}[family]
    return kind(size={"longest_edge": SIZE}, max_image_size={"longest_edge": TILE})


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> tuple[Image.Image, bytes]:
    """Return a random image as read from a file, and the contents of the file."""
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    file = io.BytesIO()
    image.save(file, kind)
    return Image.open(io.BytesIO(file.getvalue())).convert("RGB"), file.getvalue()


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    added = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=added)
