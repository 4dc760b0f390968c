"""GGUF files of encoders, with their WordPiece vocabularies, compared with transformers and llama.cpp."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import ModelFolder, open_model_folder
from midstream.model.sentence_transformers import POOLED_STATES, read_text_encoder
from midstream.model.tokenizer import Tokenizer
from tests.gpu_worker.core_with_runners import CoreWithRunners
from tests.gpu_worker.encoder_models import make_encoder
from tests.gpu_worker.test_encoders import compute, pooled
from tests.gpu_worker.tiny_models import make_runner
from tests.midstream.gguf_vocabularies import ask_llama_cpp, needs_llama_cpp

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = string.ascii_lowercase + string.digits + "!?.,'$+-北京"
_WORDS = ["some", "text", "##ing", "naive", "hello"]
TEXT = "Some texts, Naïve+texting: hello 北京 10 times! ☃"
# Texts, ids that the file names other than usually, and the ids of the tokens.
_TEXTS: list[tuple[str, dict[str, int | None], list[int]]] = [
    (
        TEXT,
        {},
        # [CLS] some text ##s , naive + text ##ing [UNK] hello 北 京 1 ##0 t ##i ##m ##e ##s ! [UNK] [SEP]
        [2, 97, 98, 69, 44, 100, 47, 98, 99, 1, 101, 49, 50, 32, 77, 24, 59, 63, 55, 69, 41, 1, 3],
    ),
    ("a [MASK] b [SEP] c[MASK]d", {}, [2, 5, 4, 6, 3, 7, 4, 8, 3]),
    ("ÀÉÎ ñ ß a\tb\nc \u00ady ａ $5", {}, [2, 5, 55, 59, 18, 1, 5, 6, 7, 29, 1, 46, 36, 3]),
    # Without ids in the file, the start token is 101, the separator 102 and the unknown token 100. The id of [CLS] is
    # not used.
    ("a ☃", {"bos": None, "seperator": None, "unknown": None, "cls": 2}, [101, 5, 100, 102]),
]
_ARCHITECTURES = {"Bert": gguf.MODEL_ARCH.BERT, "NomicBert": gguf.MODEL_ARCH.NOMIC_BERT}
_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))


def pieces() -> list[str]:
    """Return a vocabulary of 331 pieces as transformers writes it."""
    made = [*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *_WORDS]
    return [*made, *(f"unused{index}" for index in range(331 - len(made)))]


def marked(vocabulary: list[str]) -> list[str]:
    """Return a vocabulary as llama.cpp's converter writes it."""
    return [item if item in _SPECIAL else item[2:] if item.startswith("##") else f"▁{item}" for item in vocabulary]


def write_encoder(
    path: Path,
    family: str,
    model: Any,
    pooling: int | None = 1,
    kind: gguf.GGMLQuantizationType | None = None,
    **more: Any,
) -> Path:
    """Write a model as llama.cpp's converter does."""
    config, names = model.config, gguf.get_tensor_name_map(_ARCHITECTURES[family], model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[family]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(more.get("causal", False))
    if family == "NomicBert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if pooling is not None:
        writer.add_uint32(f"{writer.arch}.pooling_type", pooling)
    vocabulary = pieces()
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(config.type_vocab_size)
    writer.add_token_list(more.get("tokens") or marked(vocabulary))
    writer.add_token_types([3 if item in _SPECIAL else 1 for item in vocabulary])
    for key, number in {"bos": 2, "unknown": 1, "seperator": 3, "padding": 0, "mask": 4, **more.get("ids", {})}.items():
        if number is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    for name, tensor in tensors_of(family, model).items():
        if name == more.get("without"):
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = tensor.numpy()
        if kind is not None and values.ndim == 2 and "position" not in name and "type" not in name:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    if more.get("named"):
        writer.add_tensor(more["named"], np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(family: str, model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors by the names that the converter knows; Nomic's own code joins query, key and value."""
    found = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler")}
    if family == "Bert":
        return found
    made: dict[str, torch.Tensor] = {}
    places = {
        "self_attn.o_proj": "attn.out_proj", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
        "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2",
    }  # fmt: skip
    for name, value in found.items():
        if name.startswith("embeddings."):
            made[name.replace("embeddings.LayerNorm", "emb_ln")] = value
        elif ".q_proj." in name:
            parts = [found[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            made[f"encoder.{name.replace('self_attn.q_proj', 'attn.Wqkv')}"] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            _, number, rest = name.split(".", 2)
            module, _, suffix = rest.rpartition(".")
            made[f"encoder.layers.{number}.{places[module]}.{suffix}"] = value
    return made


def opened(path: Path) -> tuple[ModelFolder, list[int]]:
    folder = open_model_folder(str(path))
    return folder, Tokenizer(folder.path).encode(TEXT)


def reference_tokenizer(tmp_path: Path) -> Any:
    (tmp_path / "vocab.txt").write_text("\n".join(pieces()))
    return transformers.BertTokenizer(str(tmp_path / "vocab.txt"))


@pytest.mark.parametrize(("text", "ids", "wanted"), _TEXTS)
def test_a_text_becomes_word_pieces(text: str, ids: dict[str, int | None], wanted: list[int], tmp_path: Path) -> None:
    file = write_encoder(tmp_path / "file.gguf", "Bert", make_encoder(tmp_path, "Bert"), ids=ids)
    tokenizer = Tokenizer(open_model_folder(str(file)).path)
    assert tokenizer.encode(text) == wanted
    first, types = tokenizer.encode_pair("a", "b")
    assert first == [wanted[0], 5, wanted[-1], 6, wanted[-1]]
    assert types == [0, 0, 0, 1, 1]


@needs_llama_cpp
@pytest.mark.parametrize(("text", "ids", "wanted"), _TEXTS)
def test_llama_cpp_splits_text_so(text: str, ids: dict[str, int | None], wanted: list[int], tmp_path: Path) -> None:
    file = write_encoder(tmp_path / "file.gguf", "Bert", make_encoder(tmp_path, "Bert"), ids=ids)
    assert ask_llama_cpp(file, [text])["tokens"] == [wanted]


@pytest.mark.parametrize(("has_capitals", "wanted"), [(False, [2, 5, 6, 3]), (True, [2, 1, 6, 3])])
def test_text_becomes_lower_case_unless_the_vocabulary_has_capitals(
    has_capitals: bool, wanted: list[int], tmp_path: Path
) -> None:
    model, tokens = make_encoder(tmp_path, "Bert"), marked(pieces())
    tokens[-1] = "▁Bc" if has_capitals else tokens[-1]
    file = write_encoder(tmp_path / "file.gguf", "Bert", model, tokens=tokens)
    assert Tokenizer(open_model_folder(str(file)).path).encode("A b") == wanted


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
@pytest.mark.parametrize("family", _ARCHITECTURES)
def test_smaller_weights_are_expanded(family: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, family, hidden_act="silu" if family == "NomicBert" else "gelu")
    with torch.no_grad():  # the values that the file can hold
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "position" not in name and "type" not in name:
                parameter.copy_(
                    torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind))
                )
    folder, ids = opened(write_encoder(tmp_path / "file.gguf", family, model, kind=kind))
    check_vector(folder, model, ids, "mean")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": 4, "named": "cls.weight"}, r"GGUF files of rerankers and classifiers are not supported"),
        ({"causal": True}, r"bert\.attention\.causal is not supported"),
    ],
)
def test_other_kinds_of_models_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_encoder(tmp_path / "file.gguf", "Bert", make_encoder(tmp_path, "Bert"), **settings)
    with pytest.raises(UnsupportedError, match=message):
        open_model_folder(str(file))


@pytest.mark.parametrize(
    ("without", "named", "message"),
    [
        ("embeddings.position_embeddings.weight", "", r"the weights lack embeddings\.position_embeddings\.weight"),
        ("encoder.layer.1.output.dense.bias", "", r"the weights lack encoder\.layer\.1\.output\.dense\.bias"),
        ("", "more.weight", r"the weights have a tensor more\.weight of shape \[2, 2\], which does not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_named(without: str, named: str, message: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert")
    file = write_encoder(tmp_path / "file.gguf", "Bert", model, without=without, named=named)
    with pytest.raises(ConfigError, match=message):
        make_runner(open_model_folder(str(file)).path)


@pytest.mark.parametrize("family", _ARCHITECTURES)
@pytest.mark.parametrize("mode", _POOLING)
def test_ids_and_vectors_are_those_of_transformers(family: str, mode: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, family, hidden_act="silu" if family == "NomicBert" else "gelu")
    folder, ids = opened(write_encoder(tmp_path / "file.gguf", family, model, _POOLING[mode]))
    assert ids == reference_tokenizer(tmp_path)(TEXT)["input_ids"]
    assert read_text_encoder(folder.path, is_encoder=folder.is_encoder).pooling == (mode,)
    check_vector(folder, model, ids, mode)


def check_vector(folder: ModelFolder, model: Any, ids: list[int], mode: str) -> None:
    core = CoreWithRunners(make_runner(folder.path), ())
    (found,) = compute(core, [ids], POOLED_STATES[mode])
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    np.testing.assert_allclose(found, pooled(states, mode), atol=1e-4)


@needs_llama_cpp
@pytest.mark.parametrize("family", _ARCHITECTURES)
def test_ids_and_vectors_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, family, hidden_act="silu" if family == "NomicBert" else "gelu")
    file = write_encoder(tmp_path / "file.gguf", family, model)
    _, ids = opened(file)
    answer = ask_llama_cpp(file, [TEXT], embeds=TEXT, has_pooling=True)
    assert answer["tokens"] == [ids]
    with torch.no_grad():
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    wanted = np.array(answer["embedding"])
    assert mean @ wanted / np.linalg.norm(mean) / np.linalg.norm(wanted) > 0.9999
