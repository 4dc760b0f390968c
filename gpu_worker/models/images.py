"""Encodes images with transformers' own processor, vision encoder and connector; our decoder runs the language model.

The result is a table of virtual tokens, and the text that stands for the image in a prompt: the image token once for
each row, among the tokens that mark the image's tiles.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.models.image_files import ImageFiles
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Prefixes of the tensors of the vision encoder and the connector.
_PARTS = ("model.vision_model.", "model.connector.")
_FRAME, _WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image.

    Attributes:
        embeddings: [num_tokens, hidden_size], on the CPU.
        text: The text that replaces the image's placeholder in a prompt; it contains the image token num_tokens times.
    """

    embeddings: Tensor
    text: str


class ImageEncoder:
    """The vision encoder of one model. It is not thread-safe, but may run at the same time as the decoder's steps."""

    def __init__(self, folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
        """Load the processor and the encoder of `folder`, which must have an image token. Raises ConfigError if a file
        or tensor is missing, or UnsupportedError if a package that reads images is missing.
        """
        started = time.perf_counter()
        assert folder.image_token_id is not None
        self._device, self._dtype = device, dtype
        self._image_token = Tokenizer(folder.path).token(folder.image_token_id)
        if self._image_token is None:
            raise ConfigError(f"tokenizer.json lacks the image token, id {folder.image_token_id}", field="model")
        self._processor = _processor(folder)
        self._files = ImageFiles()
        self._model = _load(folder, device, dtype)
        logger.info("loaded the vision encoder of %s in %.1f s", folder.name, time.perf_counter() - started)

    def close(self) -> None:
        """Stop the process that reads files."""
        self._files.close()

    @torch.inference_mode()
    def encode(self, data: bytes) -> EncodedImage:
        """Encode an image file (its first frame), turned upright. Raises InvalidArgumentError if `data` is not a file
        of image_file_reader.FORMATS, or the image is too large.
        """
        inputs = self._processor(images=[self._files.read(data)], return_tensors="pt", return_row_col_info=True)
        features = self._model.get_image_features(
            pixel_values=inputs["pixel_values"].to(self._device, self._dtype),
            pixel_attention_mask=inputs["pixel_attention_mask"].to(self._device),
        )
        (embeddings,) = features.pooler_output
        num_rows, num_columns = inputs["rows"][0][0], inputs["cols"][0][0]
        return EncodedImage(embeddings.cpu().contiguous(), self._text(num_rows, num_columns, len(embeddings)))

    def _text(self, num_rows: int, num_columns: int, num_tokens: int) -> str:
        """Return the text for an image of `num_rows` x `num_columns` tiles, followed by the whole image."""
        tile = str(self._image_token) * (num_tokens // (num_rows * num_columns + 1))
        lines = [
            "".join(f"{_FRAME}<row_{row}_col_{column}>{tile}" for column in range(1, num_columns + 1)) + "\n"
            for row in range(1, num_rows + 1)
        ]
        gap = "\n" if lines else ""
        return "".join(lines) + f"{gap}{_FRAME}{_WHOLE}{tile}{_FRAME}"


def _processor(folder: ModelFolder) -> Any:
    """Return transformers' image processor, in the variant that needs only Pillow."""
    try:
        import PIL  # noqa: F401 (without it, the import below yields a class that fails when it is used)
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    except ImportError as error:
        raise UnsupportedError(f"images need pillow and a newer transformers ({error})", field="model") from None
    kinds = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
    try:
        return kinds[folder.architecture].from_pretrained(folder.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the image processor of {folder.path} cannot be loaded: {error}", field="model") from None


def _load(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model without its language model."""
    import transformers  # imported here, because it takes a second, and most models do not accept images

    config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = transformers.AutoModel.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    del model.text_model
    tensors: dict[str, Tensor] = {}
    for path in folder.weight_files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is not iterable)
                    if name.startswith(_PARTS):
                        tensors[name.removeprefix("model.")] = file.get_tensor(name).to(device, dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"the tensors of the vision encoder of {folder.path} do not match config.json: {error}", field="model"
        ) from None
    return model
