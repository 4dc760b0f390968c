"""Models of the Hugging Face Hub: `ORG/NAME`, `ORG/NAME@REVISION` or `ORG/NAME/FILE.gguf`.

huggingface_hub stores downloads in its own cache, to which Midstream writes nothing. HF_TOKEN or `hf auth login` sets
the token, HF_ENDPOINT sets another server, and with HF_HUB_OFFLINE=1 only the cache is used.
"""

from __future__ import annotations

import re
from pathlib import Path

from midstream.errors import ConfigError
from midstream.model.prepare.gguf_file import part_names

_NAME = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(/[\w./-]+\.gguf)?(?:@([\w./-]+))?", re.ASCII)
_CACHE_FOLDER = re.compile(r"models--(.+?)--(.+)")
_FILES = [
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "preprocessor_config.json",
    "processor_config.json",
    "*.safetensors", "*.safetensors.index.json",
    # How models of sentence-transformers make vectors and scores.
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "*/config.json",
]  # fmt: skip
# Files that are not downloaded: other formats of the same weights, and weights in subfolders of the repository.
_IGNORED = ["consolidated*", "*/*.safetensors*"]


def is_hub_name(model: str) -> bool:
    """Return whether `model` is a name on the Hub and not a path on this machine."""
    return _NAME.fullmatch(model) is not None and not model.startswith(("./", "../")) and not Path(model).exists()


def download(model: str) -> Path:
    """Download files missing from the Hub's cache, with a progress bar, and return the cached folder or .gguf file.

    Raises:
        ConfigError: The repository, revision or file does not exist or requires a token, or the Hub cannot be reached.
    """
    match = _NAME.fullmatch(model)
    if match is None:
        raise ConfigError(
            f"{model!r} is not a name on the Hugging Face Hub (ORG/NAME or ORG/NAME@REVISION)", field="model"
        )
    repository, file, revision = match.groups()
    try:
        from huggingface_hub import errors, hf_hub_download, snapshot_download
    except ModuleNotFoundError:
        raise ConfigError("names on the Hub require the package huggingface_hub: pip install huggingface_hub") from None
    try:
        if file:
            names = part_names(file.removeprefix("/"))
            parts = [hf_hub_download(repository, name, revision=revision) for name in names]
            return Path(parts[0])
        found = snapshot_download(repository, revision=revision, allow_patterns=_FILES, ignore_patterns=_IGNORED)
    except errors.GatedRepoError:
        problem = "requires its license to be accepted; do so on its page, then set HF_TOKEN to your token"
    except errors.RepositoryNotFoundError:
        problem = "is neither a folder here nor on the Hub; if it is private, set HF_TOKEN to a token that may read it"
    except errors.RevisionNotFoundError:
        problem = f"has no revision {revision!r}"
    except errors.EntryNotFoundError as error:
        # LocalEntryNotFoundError means that the Hub is unreachable or that offline mode is on; only its cause tells
        # which.
        is_local = isinstance(error, errors.LocalEntryNotFoundError)
        problem = (
            "is neither a folder here nor in the Hub's cache, and the Hub cannot be reached"
            if is_local
            else f"has no file {file}"
        )
    except (errors.HfHubHTTPError, OSError) as error:
        problem = f"cannot be downloaded: {error}"
    else:
        return Path(found)
    raise ConfigError(f"{repository} {problem}", field="model") from None


def repository_of(folder: Path) -> str:
    """Return ORG/NAME of a snapshot in the Hub's cache; empty for any other folder."""
    if folder.parent.name != "snapshots":
        return ""
    match = _CACHE_FOLDER.fullmatch(folder.parents[1].name)
    return "/".join(match.groups()) if match else ""
