"""Measure the perplexity of a model that is quantized again to each weight format: in transformers, with the
dequantized values in float32, and as a worker with default settings computes it.

`python -m benchmarks.format_perplexity` rounds the matrices of the embedded model's linear layers to the nearest level
of each format. Checkpoints are made as in tests/gpu_worker/quantized_models.py; GGUF files by the `gguf` package, whose
values transformers reads. For the K types, which `gguf` cannot write, scales are chosen from each block's range; as in
llama.cpp, matrices whose rows are not multiples of 256 have another type (for Q3_K, llama.cpp uses IQ4_NL, which `gguf`
cannot write either, so Q4_0 is used here).
"""

from __future__ import annotations

import argparse
import copy
import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.models.perplexity import WINDOW, first_windows, perplexity
from midstream.model.folder import ModelFolder, open_model_folder
from tests.gpu_worker.quantized_models import SCHEMES, quantize_model

_UNCHANGED = "unchanged"
NUM_WINDOWS = 4  # 2,048 tokens
# GGUF type of most matrices, and that of matrices whose rows are not multiples of 256.
GGUF_TYPES = {
    "GGUF Q4_0": (Type.Q4_0, Type.Q4_0),
    "GGUF Q4_1": (Type.Q4_1, Type.Q4_1),
    "GGUF Q5_0": (Type.Q5_0, Type.Q5_0),
    "GGUF Q5_1": (Type.Q5_1, Type.Q5_1),
    "GGUF Q8_0": (Type.Q8_0, Type.Q8_0),
    "GGUF MXFP4": (Type.MXFP4, Type.MXFP4),
    "GGUF Q3_K": (Type.Q3_K, Type.Q4_0),
    "GGUF Q4_K": (Type.Q4_K, Type.Q5_0),
    "GGUF Q5_K": (Type.Q5_K, Type.Q5_1),
    "GGUF Q6_K": (Type.Q6_K, Type.Q8_0),
}
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _divided(values: Floats, by: Floats) -> Floats:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _halves(values: Floats) -> Bytes:
    return values.astype(np.float16)[:, None].view(np.uint8)


def _scales_and_minimums(rows: Floats, most: int) -> tuple[Bytes, Bytes]:
    """Return the scales and minimums of blocks [N, 256] in the form in which Q4_K and Q5_K store them, and the levels
    [N, 8, 32].
    """
    parts = rows.reshape(-1, 8, 32)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    steps = (high - low) / most
    scale, minimum = (wide.max(-1) / 63 for wide in (steps, -low))
    scale, minimum = (wide.astype(np.float16).astype(np.float32) for wide in (scale, minimum))
    s = np.round(_divided(steps, np.broadcast_to(scale[:, None], steps.shape))).clip(0, 63).astype(np.uint8)
    m = np.round(_divided(-low, np.broadcast_to(minimum[:, None], steps.shape))).clip(0, 63).astype(np.uint8)
    step = np.broadcast_to((scale[:, None] * s)[..., None], parts.shape)
    levels = np.round(_divided(parts + (minimum[:, None] * m)[..., None], step)).clip(0, most).astype(np.uint8)
    packed = (s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return np.concatenate((_halves(scale), _halves(minimum), *packed), axis=1), levels


def _nibbles(levels: Bytes) -> Bytes:
    made: Bytes = (levels[:, ::2] & 15 | (levels[:, 1::2] & 15) << 4).astype(np.uint8).reshape(len(levels), 128)
    return made


def _q3_k(rows: Floats) -> Bytes:
    parts = rows.reshape(-1, 16, 16)
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)[..., 0]
    steps = (extreme / -4).astype(np.float32)  # the extreme becomes -4; the largest level is 3
    scale = (np.abs(steps).max(-1) / 31).astype(np.float16).astype(np.float32)
    s = np.round(_divided(steps, np.broadcast_to(scale[:, None], steps.shape))).clip(-31, 31)
    step = np.broadcast_to((scale[:, None] * s)[..., None], parts.shape)
    levels = (np.round(_divided(parts, step)).clip(-4, 3) + 4).astype(np.uint8)
    bits = (levels.reshape(-1, 8, 32) >> 2 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    twos = (np.arange(4, dtype=np.uint8) * 2)[:, None]
    low = ((levels.reshape(-1, 2, 4, 32) & 3) << twos).sum(2, dtype=np.uint8).reshape(-1, 64)
    codes = (s + 32).astype(np.uint8)
    high = (codes.reshape(-1, 4, 4) >> 4 << twos).sum(1, dtype=np.uint8)
    return np.concatenate((bits, low, codes[:, :8] & 15 | (codes[:, 8:] & 15) << 4, high, _halves(scale)), axis=1)


def _q4_k(rows: Floats) -> Bytes:
    head, levels = _scales_and_minimums(rows, 15)
    return np.concatenate((head, _nibbles(levels)), axis=1)


def _q5_k(rows: Floats) -> Bytes:
    head, levels = _scales_and_minimums(rows, 31)
    high = (levels >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return np.concatenate((head, high, _nibbles(levels)), axis=1)


def _q6_k(rows: Floats) -> Bytes:
    parts = rows.reshape(-1, 16, 16)
    steps = np.abs(parts).max(-1) / 31
    scale = (steps.max(-1) / 127).astype(np.float16).astype(np.float32)
    s = np.round(_divided(steps, np.broadcast_to(scale[:, None], steps.shape))).clip(0, 127).astype(np.int8)
    step = np.broadcast_to((scale[:, None] * s)[..., None], parts.shape)
    levels = (np.round(_divided(parts, step)).clip(-32, 31) + 32).astype(np.uint8)
    low = levels.reshape(-1, 2, 2, 64)
    high = levels.reshape(-1, 2, 4, 32) >> 4 << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    codes = (low[:, :, 0] & 15 | (low[:, :, 1] & 15) << 4).reshape(-1, 128)
    return np.concatenate(
        (codes, high.sum(2, dtype=np.uint8).reshape(-1, 64), s.view(np.uint8), _halves(scale)), axis=1
    )


_K_TYPES = {Type.Q3_K: _q3_k, Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k}


def _blocks(values: Floats, kind: Type) -> Bytes:
    if kind not in _K_TYPES:
        made: Bytes = gguf.quants.quantize(values, kind)
        return made
    return _K_TYPES[kind](values.reshape(-1, 256)).reshape(len(values), -1)


def write_gguf(source: Path, target: Path, kind: Type, narrow_kind: Type) -> None:
    """Copy a GGUF file with other types of matrices; embeddings and vectors are not changed."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            own = narrow_kind if values.shape[1] % 256 else kind
            writer.add_tensor(tensor.name, _blocks(values, own), raw_dtype=own)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _open(folder: Path) -> Any:
    """Open a folder's GGUF file with transformers, in float32."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, gguf_file="model.gguf", dtype=torch.float32).eval()


@torch.inference_mode()
def nominal(model: Any, pieces: list[Tensor]) -> float:
    """Return the perplexity that transformers computes."""
    loss = 0.0
    for piece in pieces:
        logits = model(piece[None].long()).logits[0]
        loss += torch.nn.functional.cross_entropy(logits[:-1], piece[1:].long(), reduction="sum").item()
    return float(torch.tensor(loss / (len(pieces) * (WINDOW - 1))).exp())


def _measure(name: str, source: ModelFolder, original: Any, pieces: list[Tensor]) -> tuple[float, float]:
    """Return the perplexity of a format as transformers computes it, and that of a worker; `original` is the unchanged
    model in transformers.
    """
    if name == _UNCHANGED:
        return nominal(original, pieces), perplexity(source, pieces)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for file in _FILES:
            shutil.copy(source.path / file, folder)
        if name in GGUF_TYPES:
            write_gguf(source.path / "model.gguf", folder / "model.gguf", *GGUF_TYPES[name])
            model = _open(folder)
        else:
            model = copy.deepcopy(original)
            tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}  # tied
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            quantize_model(folder, model, name)
        expected = nominal(model, pieces)
        del model
        gc.collect()
        return expected, perplexity(open_model_folder(made), pieces)


def main() -> None:
    """Print one row for each format as soon as it is measured."""
    formats = [_UNCHANGED, *SCHEMES, *GGUF_TYPES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="+", choices=formats, default=formats)
    parser.add_argument("--max-windows", type=int, default=NUM_WINDOWS, help=f"[{NUM_WINDOWS}]")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    source = open_model_folder("smollm2")
    pieces = first_windows(source, None, arguments.max_windows)
    original = _open(source.path)
    print("| format | dequantized, float32 | as served |\n| --- | ---: | ---: |")
    for name in arguments.format:
        expected, served = _measure(name, source, original, pieces)
        print(f"| {name} | {expected:.3f} | {served:.3f} |", flush=True)


if __name__ == "__main__":
    main()
