"""Creates a model folder from a GGUF file: the file itself, and its configuration and tokenizer as JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from midstream.errors import ConfigError
from midstream.model.prepare.gguf_config import build_config, pooling_of, sampling_of, special_ids
from midstream.model.prepare.gguf_file import gguf_parts, read_gguf_head, read_vector
from midstream.model.prepare.gguf_tokenizer import build_tokenizer

# Template files of a model folder, by the templates' keys in the GGUF file.
_TEMPLATES = {
    "tokenizer.chat_template": "chat_template.jinja",
    "tokenizer.chat_template.tool_use": "additional_chat_templates/tool_use.jinja",
}


def lay_down(gguf_file: Path, folder: Path, sampling: Mapping[str, float]) -> None:
    """Fill the empty `folder` with config.json, the tokenizer's files, the chat templates if there are any, and
    model.gguf.

    Sampling parameters that the file recommends (`general.sampling.*`) override those of `sampling`.

    model.gguf is a hard link to `gguf_file` if the file system allows it, otherwise a copy; the parts of a divided file
    become model-00001-of-00003.gguf and so on. Raises ConfigError if a file is not GGUF or is damaged, or a part is
    missing, and UnsupportedError if its architecture or tokenizer is not supported.
    """
    parts = gguf_parts(gguf_file)
    heads = [read_gguf_head(part) for part in parts]
    for number, head in enumerate(heads):
        place = head.metadata.get("split.no", 0), head.metadata.get("split.count", 0) or 1
        if place != (number, len(parts)):
            raise ConfigError(
                f"{parts[number]} is part {place[0]} of {place[1]} by its keys split.no and split.count; must be named "
                "NAME-00001-of-00003.gguf with its number, counted from 1, and the number of parts",
                field="model",
            )
    metadata = heads[0].metadata
    owners = {
        name: (part, entry) for part, head in zip(parts, heads, strict=True) for name, entry in head.tensors.items()
    }
    _write(folder / "config.json", build_config(metadata, owners, lambda name: read_vector(*owners[name])))
    tokenizer, tokenizer_config = build_tokenizer(metadata)
    _write(folder / "tokenizer.json", tokenizer, indent=None)  # large, and indented JSON takes ten times as long
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "generation_config.json", {**special_ids(metadata), **sampling, **sampling_of(metadata)})
    if (pooling := pooling_of(metadata)) is not None:
        (folder / "1_Pooling").mkdir()
        _write(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    for key, file in _TEMPLATES.items():
        if isinstance(template := metadata.get(key), str):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(template, encoding="utf-8")
    for number, part in enumerate(parts, 1):
        name = "model.gguf" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.gguf"
        source, target = part.resolve(), folder / name
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _write(path: Path, value: Mapping[str, object], indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
