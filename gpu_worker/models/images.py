"""Encodes images with transformers' own processor, vision encoder and connector; our decoder runs the language model.

The result is a table of virtual tokens, and the text that stands for the image in a prompt: the image token once for
each row, among the tokens that mark the image's lines or tiles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.models.image_families import image_family
from gpu_worker.models.image_files import ImageFiles
from midstream.errors import ConfigError, InvalidArgumentError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Prefixes of the tensors of the language model; all others belong to the vision encoder and the connector.
_LANGUAGE = ("language_model.", "text_model.", "lm_head.")


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
        or tensor is missing, or UnsupportedError if the encoder is not supported or a package that reads images is
        missing.
        """
        import transformers  # imported here, because it takes a second, and most models do not accept images

        started = time.perf_counter()
        assert folder.image_token_id is not None
        self._device, self._dtype = device, dtype
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
        family = image_family(config)
        if family is None:
            kind = config.vision_config.model_type
            raise UnsupportedError(
                f"{folder.architecture} with the vision encoder {kind!r} is not supported", field="model"
            )
        self._family, self._options = family, family.options(config)
        tokenizer = Tokenizer(folder.path)
        token = tokenizer.token(folder.image_token_id)
        if token is None:
            raise ConfigError(f"tokenizer.json lacks the image token, id {folder.image_token_id}", field="model")
        self._token = token
        for other in family.tokens:
            if len(tokenizer.encode(other, add_special_tokens=False)) != 1:
                raise ConfigError(f"tokenizer.json lacks the token {other}, which marks images", field="model")
        self._processor = _processor(folder)
        self._files = ImageFiles()
        self._model = _load(folder, config, device, dtype)
        logger.info("loaded the vision encoder of %s in %.1f s", folder.name, time.perf_counter() - started)

    def close(self) -> None:
        """Stop the process that reads files."""
        self._files.close()

    @torch.inference_mode()
    def encode(self, data: bytes) -> EncodedImage:
        """Encode an image file (its first frame), turned upright. Raises InvalidArgumentError if `data` is not a file
        of image_file_reader.FORMATS, or the image is too large, or too narrow for the model's processor.
        """
        image = self._files.read(data)
        # With an only image that becomes one embedding, transformers' Mistral 3 loses a dimension.
        num_copies = 2 if max(image.size) <= self._options.get("patch_size", 0) else 1
        try:
            made = self._processor(images=[image] * num_copies, return_tensors="pt", **self._options)
        except ValueError as error:
            size = f"{image.width} x {image.height}"
            raise InvalidArgumentError(
                f"has {size} pixels, which the model's processor cannot scale: {str(error)[:200]}", field="data"
            ) from None
        inputs = {name: value.to(self._device) for name, value in made.items() if name in _INPUTS}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        features = self._model.get_image_features(**inputs).pooler_output
        # An image has one or more parts, such as tiles.
        parts = features[: len(features) // num_copies]
        embeddings = torch.cat([part.flatten(0, -2) for part in parts]).cpu().contiguous()
        return EncodedImage(embeddings, self._family.text(self._token, len(embeddings), {**made, **self._options}))


# What the encoders take of a processor's output.
_INPUTS = ("pixel_values", "pixel_attention_mask", "image_sizes")


def _processor(folder: ModelFolder) -> Any:
    """Return transformers' image processor, in the variant that needs only Pillow: other variants scale differently."""
    try:
        import PIL  # noqa: F401 (without it, the import below yields a class that fails when it is used)
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise UnsupportedError(f"images need pillow and a newer transformers ({error})", field="model") from None
    try:
        return AutoImageProcessor.from_pretrained(folder.path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the image processor of {folder.path} cannot be loaded: {error}", field="model") from None


def _load(folder: ModelFolder, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model with a language model of no use, which takes no memory: transformers then renames the
    tensors of older files by itself.
    """
    import transformers

    sizes = dict.fromkeys(("num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads"), 1)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config.text_config = transformers.LlamaConfig(hidden_size=folder.hidden_size, head_dim=2, **sizes, **special)
    if hasattr(config, "quantization_config"):  # of the language model
        del config.quantization_config
    kind = transformers.MODEL_MAPPING[type(config)]
    try:
        with _quiet():
            model, report = kind.from_pretrained(
                None, config=config, state_dict=_tensors(folder), dtype=dtype, output_loading_info=True
            )
    except RuntimeError as error:
        raise ConfigError(
            f"the tensors of the vision encoder of {folder.path} do not match config.json: {error}", field="model"
        ) from None
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(_LANGUAGE))
    if missing:
        raise ConfigError(f"the weights of {folder.path} lack {', '.join(missing[:3])}", field="model")
    return model.eval().to(device)


def _tensors(folder: ModelFolder) -> dict[str, Tensor]:
    """Return the tensors that do not belong to the language model."""
    tensors: dict[str, Tensor] = {}
    for path in folder.weight_files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is not iterable)
                    if not name.removeprefix("model.").startswith(_LANGUAGE):
                        tensors[name] = _checked(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    return tensors


def _checked(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor. Raises UnsupportedError if it is quantized."""
    if tensor.itemsize == 1:
        raise UnsupportedError(f"the tensor {name} of the vision encoder is quantized ({tensor.dtype})", field="model")
    return tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting the language model's tensors as missing."""
    from transformers.utils import logging as messages

    before = messages.get_verbosity()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(before)
        messages.enable_progress_bar()
