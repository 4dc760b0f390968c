"""Encoded images against transformers' own models and processors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from gpu_worker.models.images import ImageEncoder
from midstream.errors import ConfigError, InvalidArgumentError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.vision_model import TOKENS_PER_TILE, image_processor, make_vision_model, picture

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idefics3")
    make_vision_model(folder)
    return folder


@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
@pytest.mark.parametrize(("size", "kind"), [((60, 31), "PNG"), ((20, 50), "JPEG")])
def test_an_image_is_encoded_as_by_transformers(family: str, size: tuple[int, int], kind: str, tmp_path: Path) -> None:
    model, _ = make_vision_model(tmp_path, family)
    image, data = picture(*size, kind=kind)
    found = ImageEncoder(open_model_folder(str(tmp_path)), CPU, torch.float32).encode(data)
    inputs = image_processor(family)(images=[image], return_tensors="pt", return_row_col_info=True)
    rows, columns = inputs.pop("rows")[0][0], inputs.pop("cols")[0][0]
    with torch.inference_mode():
        (wanted,) = model.get_image_features(**inputs).pooler_output
    assert torch.equal(found.embeddings, wanted)
    assert found.text == get_image_prompt_string(
        rows, columns, TOKENS_PER_TILE, "<fake_token_around_image>", "<image>", "<global-img>"
    )
    assert found.text.count("<image>") == len(wanted) > TOKENS_PER_TILE


def test_an_image_without_tiles_is_one_tile(folder: Path) -> None:
    config = folder / "preprocessor_config.json"
    text = config.read_text()
    config.write_text(text.replace('"do_image_splitting": true', '"do_image_splitting": false'))
    found = ImageEncoder(open_model_folder(str(folder)), CPU, torch.float32).encode(picture(60, 31)[1])
    config.write_text(text)
    wanted = get_image_prompt_string(0, 0, TOKENS_PER_TILE, "<fake_token_around_image>", "<image>", "<global-img>")
    assert found.text == wanted
    assert len(found.embeddings) == TOKENS_PER_TILE


def bomb() -> bytes:
    """Return the header of a PNG file with more pixels than are allowed."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 1 << 13, (1 << 12) + 1, 8, 2, 0, 0, 0)
    chunks = (
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, b"IDAT")
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"no image", "not an image"),
        (picture(9, 9, kind="BMP")[1], "not an image"),
        (picture(90, 90)[1][:2000], "cannot be read"),
        (bomb(), "33562624 pixels"),
    ],
    ids=["empty", "text", "other_type", "cut_off", "too_large"],
)
def test_what_is_no_image_is_refused(folder: Path, data: bytes, reason: str) -> None:
    encoder = ImageEncoder(open_model_folder(str(folder)), CPU, torch.float32)
    with pytest.raises(InvalidArgumentError, match=reason) as raised:
        encoder.encode(data)
    assert raised.value.field == "data"


def test_a_folder_without_processor_is_refused(folder: Path) -> None:
    config = folder / "preprocessor_config.json"
    config.rename(folder / "other.json")
    try:
        with pytest.raises(ConfigError, match="image processor"):
            ImageEncoder(open_model_folder(str(folder)), CPU, torch.float32)
    finally:
        (folder / "other.json").rename(config)
