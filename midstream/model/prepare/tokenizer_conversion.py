"""Makes tokenizer.json from the files of older tokenizers, with transformers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from midstream.errors import ConfigError

# Files of a tokenizer that transformers converts.
_CONVERTIBLE = (("tokenizer.model",), ("vocab.json", "merges.txt"))


def convertible_tokenizer(folder: Path) -> tuple[str, ...]:
    """Return the names of the files from which tokenizer.json can be made; empty if there are none."""
    return next((names for names in _CONVERTIBLE if all((folder / name).is_file() for name in names)), ())


def convert_tokenizer(folder: Path, source: Path) -> None:
    """Add tokenizer.json to `folder`, and tokenizer_config.json if it has none.

    Args:
        source: The folder to name in errors.

    Raises:
        ConfigError: transformers or a package that it needs is missing, or it cannot read the files.
    """
    names = " and ".join(convertible_tokenizer(folder))
    if "tokenizer.model" in names and not _has_sentence_piece():
        raise ConfigError(
            f"converting {names} in {source} requires sentencepiece: pip install sentencepiece", field="model"
        )
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"converting {names} in {source} requires transformers: {error}", field="model") from None
    with tempfile.TemporaryDirectory() as temporary:
        try:
            AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(temporary)
        except Exception as error:  # the library raises errors of many kinds for files that it cannot read
            raise ConfigError(f"transformers cannot convert {names} in {source}: {error}", field="model") from error
        if not (Path(temporary) / "tokenizer.json").is_file():
            raise ConfigError(f"transformers has no fast tokenizer for {names} in {source}", field="model")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).exists():
                shutil.copyfile(Path(temporary) / name, folder / name)


def _has_sentence_piece() -> bool:
    try:
        import sentencepiece  # noqa: F401 (transformers needs it)
    except ModuleNotFoundError:
        return False
    return True
