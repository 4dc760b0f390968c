"""How the families of models of text and images encode an image: what differs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_FRAME, _WHOLE = "<fake_token_around_image>", "<global-img>"
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """A family.

    Attributes:
        text: Returns the text that stands for an image in a prompt, given the image token, the number of embeddings,
            and the processor's output and options for this image. It contains the image token once for each embedding.
        tokens: Other tokens in this text, which the tokenizer must have.
        options: Returns further arguments of the processor, given config.json.
    """

    text: Callable[[str, int, Mapping[str, Any]], str]
    tokens: tuple[str, ...] = ()
    options: Callable[[Any], dict[str, Any]] = field(default=lambda _: {})


def _tiles(token: str, count: int, made: Mapping[str, Any]) -> str:
    """Return rows of tiles, followed by the whole image."""
    num_rows, num_columns = made["rows"][0][0], made["cols"][0][0]
    tile = token * (count // (num_rows * num_columns + 1))
    lines = [
        "".join(f"{_FRAME}<row_{row}_col_{column}>{tile}" for column in range(1, num_columns + 1)) + "\n"
        for row in range(1, num_rows + 1)
    ]
    gap = "\n" if lines else ""
    return "".join(lines) + f"{gap}{_FRAME}{_WHOLE}{tile}{_FRAME}"


def _lines(token: str, count: int, made: Mapping[str, Any]) -> str:
    """Return rows of patches with breaks between them."""
    num_rows = int(made["image_sizes"][0][0]) // made["patch_size"]
    return _BREAK.join([token * (count // num_rows)] * num_rows) + _END


def _merged_patch(config: Any) -> dict[str, Any]:
    """Return the size of the squares that become one embedding: images are scaled to a multiple of it."""
    return {"patch_size": config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)}


_PIXTRAL = ImageFamily(_lines, (_BREAK, _END), _merged_patch)
_BY_TOWER = {"pixtral": _PIXTRAL}
_BY_TYPE = {
    **dict.fromkeys(
        ("idefics3", "smolvlm"), ImageFamily(_tiles, (_FRAME, _WHOLE), lambda _: {"return_row_col_info": True})
    ),
    **dict.fromkeys(("llava", "llava_next"), ImageFamily(lambda token, count, _: token * count)),
    "internvl": ImageFamily(lambda token, count, _: f"<img>{token * count}</img>", ("<img>", "</img>")),
}


def image_family(config: Any) -> ImageFamily | None:
    """Return the family of a model, given transformers' configuration; None if its vision encoder is not supported."""
    tower = config.vision_config.model_type
    return _BY_TOWER.get(tower) or _BY_TYPE.get(config.model_type)
