"""Tiny random models of text and images with a byte-level tokenizer, and images for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.internvl.processing_internvl import InternVLProcessor

# An image of up to TILE pixels in each direction is one tile; a larger one is scaled to SIZE pixels and divided into
# tiles.
TILE, SIZE, TOKENS_PER_TILE, PATCH = 32, 64, 4, 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
}
_CLIP, _SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}
_PIXTRAL, _INTERN = {"model_type": "pixtral", "head_dim": 16}, {"model_type": "internvl_vision"}
_SQUARE = {"height": TILE, "width": TILE}
_GRID = [[TILE, SIZE], [SIZE, TILE], [SIZE, SIZE]]


@dataclass(frozen=True)
class VisionCase:
    """A tiny model.

    Attributes:
        family: Name of the family in transformers.
        text_type: `model_type` of the language model.
        vision: Settings of the vision encoder, in addition to _VISION.
        settings: Settings of config.json.
        image_processor: Class of the image processor, without its suffix, and its settings.
        processor: Name of the processor in transformers, and its settings.
    """

    family: str
    text_type: str
    vision: dict[str, Any]
    settings: dict[str, Any]
    image_processor: tuple[str, dict[str, Any]]
    processor: tuple[str, dict[str, Any]]


_TILED = {"size": {"longest_edge": SIZE}, "max_image_size": {"longest_edge": TILE}}
_CROPPED = {"size": {"shortest_edge": TILE}, "crop_size": _SQUARE}
_CLIPPED = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
CASES = {
    "idefics3": VisionCase(
        "Idefics3", "llama", {}, {}, ("Idefics3", _TILED), ("Idefics3", {"image_seq_len": TOKENS_PER_TILE})
    ),
    "smolvlm": VisionCase(
        "SmolVLM", "llama", {}, {}, ("SmolVLM", _TILED), ("Idefics3", {"image_seq_len": TOKENS_PER_TILE})
    ),
    "llava": VisionCase("Llava", "llama", _CLIP, {}, ("CLIP", _CROPPED), ("Llava", _CLIPPED)),
    "pixtral": VisionCase(
        "Llava",
        "mistral",
        _PIXTRAL,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        ("Pixtral", {"size": {"longest_edge": SIZE}, "patch_size": PATCH}),
        ("Pixtral", {"spatial_merge_size": 1}),
    ),
    "mistral3": VisionCase(
        "Mistral3",
        "mistral",
        _PIXTRAL,
        {"vision_feature_layer": -1, "spatial_merge_size": 2, "tie_word_embeddings": False},
        ("Pixtral", {"size": {"longest_edge": SIZE}, "patch_size": PATCH}),
        ("Pixtral", {"spatial_merge_size": 2}),
    ),
    "llava_next": VisionCase(
        "LlavaNext",
        "mistral",
        _CLIP,
        {"image_grid_pinpoints": _GRID},
        ("LlavaNext", {**_CROPPED, "image_grid_pinpoints": _GRID}),
        ("LlavaNext", _CLIPPED),
    ),
    "granite_vision": VisionCase(
        "LlavaNext",
        "granite",
        {**_SIGLIP, "num_hidden_layers": 3},
        {
            "image_grid_pinpoints": _GRID,
            "vision_feature_layer": [-2, -1],
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
        },
        ("LlavaNext", {"size": _SQUARE, "crop_size": _SQUARE, "image_grid_pinpoints": _GRID}),
        ("LlavaNext", {"patch_size": PATCH, "vision_feature_select_strategy": "full"}),
    ),
    "internvl": VisionCase(
        "InternVL",
        "qwen2",
        {**_INTERN, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]},
        {"tie_word_embeddings": False},
        ("GotOcr2", {"size": _SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}),
        ("InternVL", {"image_seq_length": TOKENS_PER_TILE}),
    ),
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_OF_TEXT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None, "head_dim": 16},
    "granite": {"embedding_multiplier": 3.0},
}


def make_vision_model(folder: Path, case: str = "idefics3") -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    """Write a random model to `folder`; return transformers' model and tokenizer."""
    torch.manual_seed(3)
    made, tokenizer = CASES[case], _tokenizer()
    end, image = tokenizer.convert_tokens_to_ids(["<end_of_utterance>", "<image>"])
    text = {**_TEXT, "model_type": made.text_type, "vocab_size": len(tokenizer), "eos_token_id": end}
    config_class = getattr(transformers, f"{made.family}Config")
    name = "image_token_index" if hasattr(config_class, "image_token_index") else "image_token_id"
    config = config_class(
        text_config={**text, **_OF_TEXT.get(made.text_type, {})},
        vision_config={**_VISION, **made.vision},
        **{name: image},
        **made.settings,
    )
    model: Any = getattr(transformers, f"{made.family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that the output depends on the image.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    image_processor(case).save_pretrained(folder)
    return model, tokenizer


def image_processor(case: str = "idefics3") -> Any:
    """Return transformers' image processor of a tiny model."""
    name, settings = CASES[case].image_processor
    return getattr(transformers, f"{name}ImageProcessorPil")(**settings)


def inputs_of(case: str, tokenizer: Any, prompt: str, images: Sequence[Image.Image]) -> Any:
    """Return what transformers' processor makes of a prompt with images."""
    name, settings = CASES[case].processor
    images_of = image_processor(case)
    if name not in _TEXTS:
        processor = getattr(transformers, f"{name}Processor")(images_of, tokenizer, **settings)
        made = processor(text=prompt, images=list(images), return_tensors="pt")
        return {key: value for key, value in made.items() if key not in ("rows", "cols")}
    options = {"patch_size": PATCH * settings["spatial_merge_size"]} if name == "Pixtral" else {}
    made = images_of(images=list(images), return_tensors="pt", **options)
    pieces = prompt.split("<image>")
    texts = [_TEXTS[name](made, i, **settings) for i in range(len(images))]
    text = "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)
    return {**tokenizer(text, return_tensors="pt"), **{key: made[key] for key in images_of.model_input_names}}


def _intern_text(made: Any, index: int, **settings: Any) -> str:
    own = SimpleNamespace(image_token="<image>", start_image_token="<img>", end_image_token="</img>", **settings)
    return str(InternVLProcessor.replace_image_token(own, made, index))


def _pixtral_text(made: Any, index: int, spatial_merge_size: int) -> str:
    """Return what PixtralProcessor.replace_image_token does; its module cannot be imported without torchvision."""
    height, width = (int(size) // (PATCH * spatial_merge_size) for size in made["image_sizes"][index])
    rows = ("<image>" * width + "[IMG_BREAK]") * height
    return rows.removesuffix("[IMG_BREAK]") + "[IMG_END]"


# Processors that cannot be created without torchvision.
_TEXTS: dict[str, Callable[..., str]] = {"InternVL": _intern_text, "Pixtral": _pixtral_text}


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
    added += ["[IMG_BREAK]", "[IMG_END]", "<img>", "</img>"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=added)
