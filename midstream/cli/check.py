"""`midstream check`: report what the services would make of a model, without loading its weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from midstream.cli.up import MODEL_HELP
from midstream.errors import ExecutionError, MidstreamError
from midstream.model.facts import Fact, Use, read_facts
from midstream.model.families import SERVED_FAMILIES
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.json_file import read_json
from midstream.model.prepare.gguf_file import read_gguf_head
from midstream.model.prepare.gguf_special_tokens import special_tokens_of
from midstream.model.safetensors_file import read_safetensors_head
from midstream.model.sentence_transformers import POOLED_STATES, TextEncoder, read_text_encoder
from midstream.python_process import python_command, python_environment

# Modules that report what a service makes of a model, and a package that the service needs.
_PARTS = (("gpu_worker.check_model", "torch"), ("router.check_model", "tokenizers"))
_TIMEOUT_S = 120
_WIDTH = 180  # in columns, if the output is not a terminal
# What files contribute that no other line describes, and why files are not read.
_CONTRIBUTIONS = {
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "special tokens, added tokens, and a chat template if there is no file of its own",
    "special_tokens_map.json": "special tokens, if tokenizer_config.json lists no added tokens",
    "chat_template.jinja": "the chat template",
    "chat_template.json": "the chat template, if there is no chat_template.jinja",
    "modules.json": "the modules that make vectors",
    "config_sentence_transformers.json": "prompts for texts to embed",
    "sentence_bert_config.json": "the maximum length of texts to embed",
    "preprocessor_config.json": "how images are prepared",
    "processor_config.json": "how images are prepared",
    "quantize_config.json": "the settings of the quantization, if config.json has none",
    "quant_config.json": "the settings of the quantization, if config.json has none",
    "hf_quant_config.json": "the settings of the quantization, if config.json has none",
    "midstream.json": "the identity of the model",
    "midstream.tree.json": "hashes of the weights",
}
_NOT_READ = {
    ".bin": "not read, since such files can contain code",
    ".pt": "not read, since such files can contain code",
    ".pth": "not read, since such files can contain code",
    ".py": "code of a model is never run",
    ".gguf": "not read: to serve it, name this file instead of the folder",
    ".safetensors": "not read: model.safetensors or the index of shards does not name it",
}
_REPLACED = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if the model cannot be served as it is."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    with console.status("Reading the model's files"):
        facts = list(examine(arguments.model))
    if arguments.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        table = Table("part", "", "", box=None)
        for fact in facts:
            table.add_row(fact.part, fact.use, fact.text)
        console.print(table, markup=False)
    return 1 if any(fact.use is Use.REFUSED for fact in facts) else 0


def examine(model: str) -> Iterator[Fact]:
    """Yield all that is known about `model` without its weights."""
    try:
        folder = open_model_folder(model)
        encoder = read_text_encoder(folder.path, is_encoder=folder.is_encoder)
    except MidstreamError as error:
        yield Fact("model", Use.REFUSED, error.message)
        return
    yield _model(folder)
    yield from _files(folder)
    yield _ends(folder)
    yield from _embeddings(folder, encoder)
    for module, package in _PARTS:
        yield from _ask(module, package, folder)


def _model(folder: ModelFolder) -> Fact:
    family = next((family for family in SERVED_FAMILIES if folder.architecture in family.types), None)
    name = f"{family.title} ({folder.architecture})" if family else f"{folder.architecture}, not a listed family"
    kind = (
        "classifier"
        if folder.num_labels is not None
        else "encoder"
        if folder.is_encoder
        else "model"
        if folder.has_head
        else "model without a head"
    )
    sizes = f"{folder.num_layers} layers of width {folder.hidden_size}, {folder.max_sequence_length:,} positions"
    return Fact("model", Use.USED, f"{kind} in {folder.weights_format}: {name}, {sizes}")


def _files(folder: ModelFolder) -> Iterator[Fact]:
    weights = {file.name for file in folder.weight_files}
    for file in sorted(folder.path.iterdir()):
        name = file.name
        if name in weights:
            yield Fact(name, Use.USED, _tensors(file))
        elif name in _CONTRIBUTIONS:
            yield Fact(name, Use.USED, _CONTRIBUTIONS[name])
        elif file.suffix in _NOT_READ:
            yield Fact(name, Use.IGNORED, _NOT_READ[file.suffix])
        elif name in _REPLACED:
            yield Fact(name, Use.IGNORED, "tokenizer.json is read instead")


def _tensors(file: Path) -> str:
    """Return the number of tensors of each type in a weight file."""
    if file.suffix == ".gguf":
        types = Counter(_type_name(entry.type) for entry in read_gguf_head(file).tensors.values())
    else:
        types = Counter(tensor.dtype for tensor in read_safetensors_head(file).values())
    return "tensors: " + ", ".join(f"{count} {name}" for name, count in types.most_common())


def _type_name(number: int) -> str:
    """Return the name of a GGUF type, or its number if the package that knows the names is not installed."""
    try:
        from gguf import GGMLQuantizationType
    except ModuleNotFoundError:
        return f"GGML type {number}"
    return GGMLQuantizationType(number).name if number in list(GGMLQuantizationType) else f"GGML type {number}"


def _ends(folder: ModelFolder) -> Fact:
    """Return the ids that end an output, with their sources."""
    sources = [f"{token_id} ({_source(folder, token_id)})" for token_id in folder.end_ids]
    if not sources:
        return Fact("end ids", Use.IGNORED, "there are none, so outputs end only at their limits or stop words")
    return Fact("end ids", Use.USED, ", ".join(sources))


def _source(folder: ModelFolder, token_id: int) -> str:
    if folder.weights_format == "gguf":
        metadata = read_gguf_head(folder.weight_files[0]).metadata
        named = special_tokens_of(metadata).named
        key = next(
            (key for key in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if named.get(key) == token_id), ""
        )
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        return f"tokenizer.ggml.{key}_token_id" if key else f"llama.cpp's rules for {tokens[token_id]!r}"
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder.path / name, optional=True)
        nested = config.get("text_config")
        for part in (config, nested if isinstance(nested, dict) else {}):
            value = part.get("eos_token_id")
            if token_id in (value if isinstance(value, list) else [value]):
                return name
    return "eos_token of tokenizer_config.json"


def _embeddings(folder: ModelFolder, encoder: TextEncoder) -> Iterator[Fact]:
    is_own = (folder.path / "modules.json").is_file() or (folder.path / encoder.pooling_file).is_file()
    if not is_own:
        return
    modes = POOLED_STATES if folder.is_encoder else ("lasttoken", "mean")
    supported = len(encoder.pooling) == 1 and encoder.pooling[0] in modes
    pooling = " and ".join(encoder.pooling) or "none"
    advice = "" if supported else "; requests must set pooling to last or mean"
    yield Fact(encoder.pooling_file, Use.USED if supported else Use.IGNORED, f"pooling: {pooling}{advice}")
    if encoder.other_modules:
        yield Fact("embeddings", Use.REFUSED, f"modules that are not computed: {', '.join(encoder.other_modules)}")
    if encoder.prompts:
        default = f"; {encoder.default_prompt} by default" if encoder.default_prompt else ""
        yield Fact("prompts", Use.USED, ", ".join(encoder.prompts) + default)
    if encoder.max_tokens is not None:
        yield Fact("longest text to embed", Use.USED, f"{encoder.max_tokens:,} tokens")


def _ask(module: str, package: str, folder: ModelFolder) -> list[Fact]:
    """Return what a service finds out, in a process of its own."""
    if importlib.util.find_spec(package) is None:
        return [Fact(module.partition(".")[0], Use.IGNORED, f"not checked: {package} is not installed")]
    command = python_command(module, str(folder.path))
    try:
        done = subprocess.run(
            command, env=python_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [Fact(module.partition(".")[0], Use.REFUSED, f"took longer than {_TIMEOUT_S} s")]
    if done.returncode:
        raise ExecutionError(f"{module} failed: {done.stderr.strip().splitlines()[-1:]}")
    return read_facts(done.stdout)
