"""What `midstream check` reports about a model, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.check_model import facts_of as worker_facts
from midstream.cli import main
from router.check_model import facts_of as router_facts
from tests.faults.small_model import make_small_model
from tests.gpu_worker.tiny_models import make_tiny_model

REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages }}"


@pytest.fixture
def folder(tmp_path: Path, in_process: None) -> Path:
    path = make_small_model(tmp_path / "small").path
    (path / "midstream.json").unlink()  # the tests change what it describes
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report in this process, since starting the others takes seconds."""
    parts = {"gpu_worker.check_model": worker_facts, "router.check_model": router_facts}
    monkeypatch.setattr("midstream.cli.check._ask", lambda module, _, folder: list(parts[module](folder)))


def check(model: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit status, and the facts by the part that they describe."""
    status = main(["check", "--json", str(model)])
    facts = {item["part"]: (item["use"], item["text"]) for item in json.loads(capsys.readouterr().out)}
    assert status == int(any(use == "refused" for use, _ in facts.values()))
    return status, facts


def change(file: Path, **settings: Any) -> None:
    config = json.loads(file.read_text()) if file.is_file() else {}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(config | settings))


def test_the_embedded_model_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = check("smollm2", capsys)
    assert status == 0
    assert facts["model"] == ("used", "model in gguf: Llama (llama), 30 layers of width 576, 8,192 positions")
    assert facts["model.gguf"] == ("used", "tensors: 210 Q4_1, 61 F32, 1 Q8_0")
    rule = "llama.cpp's rules for"
    ends = f"2 (tokenizer.ggml.eos_token_id), 4 ({rule} '<reponame>'), 0 ({rule} '<|endoftext|>')"
    assert facts["end ids"] == ("used", ends)
    assert facts["generation_config.json"][1].endswith("temperature, top_p")
    assert facts["tokenizer"] == ("used", "49,152 tokens; a text alone gets no special tokens")
    assert facts["chat template"] == ("used", "system messages are shown; tools are not shown")


def test_a_folder_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", initializer_range=0.5, use_cache=True, a_new_setting=1)
    change(folder / "generation_config.json", eos_token_id=[2, 5], top_k=3, num_beams=4)
    (folder / "pytorch_model.bin").touch()
    (folder / "vocab.json").touch()
    (folder / "chat_template.jinja").write_text(REFUSING + "{{ tools }}")
    status, facts = check(folder, capsys)
    assert status == 0
    assert facts["end ids"] == ("used", "2 (generation_config.json), 5 (generation_config.json)")
    assert facts["generation_config.json"] == ("used", "eos_token_id, top_k")
    (unused,) = (part for part in facts if part.startswith("generation_config.json: "))
    assert "num_beams" in unused
    assert facts[unused] == ("ignored", "has no effect")
    assert facts["pytorch_model.bin"] == ("ignored", "not read, since such files can contain code")
    assert facts["vocab.json"] == ("ignored", "tokenizer.json is read instead")
    assert facts["config.json: a_new_setting"] == ("ignored", "not a setting of this family")
    assert any("initializer_range" in part for part, (_, text) in facts.items() if text == "only for training")
    assert {"hidden_size", "rope_parameters", "vocab_size"} <= set(facts["config.json"][1].split(", "))
    use, text = facts["chat template"]
    assert (use, text.startswith("system messages are refused: ")) == ("used", True)
    assert ("no system role" in text, text.endswith("; tools are shown")) == (True, True)


def test_a_model_of_sentence_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"": "Transformer", "pool": "Pooling", "2_Dense": "Dense"}
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"a.{kind}"} for path, kind in kinds.items()])
    )
    change(folder / "pool" / "config.json", pooling_mode="max")
    change(folder / "config_sentence_transformers.json", prompts={"query": "q: "}, default_prompt_name="query")
    change(folder / "sentence_bert_config.json", max_seq_length=128)
    status, facts = check(folder, capsys)
    assert status == 1
    assert facts["pool/config.json"] == ("ignored", "pooling: max; requests must set pooling to last or mean")
    assert facts["embeddings"] == ("refused", "modules that are not computed: Dense (2_Dense)")
    assert facts["prompts"] == ("used", "query; query by default")
    assert facts["longest text to embed"] == ("used", "128 tokens")


@pytest.mark.parametrize(
    ("file", "settings", "part", "message"),
    [
        (
            "config.json",
            {"hidden_act": "relu7", "quantization_config": {"quant_method": "hqq"}},
            "quantization",
            "'hqq'",
        ),
        ("config.json", {"num_key_value_heads": 3}, "config.json", "must be a multiple of num_key_value_heads"),
        ("config.json", {"architectures": ["LlamaForTokenClassification"]}, "config.json: architectures", "not served"),
        ("config.json", {"hidden_size": None}, "model", "hidden_size is None"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "chat template", "the chat template"),
        ("tokenizer_config.json", {"chat_template": "{{ 1 / 0 }}"}, "chat template", "fails for a message of a user"),
        ("tokenizer.json", {"model": {"type": "None"}}, "tokenizer", "tokenizer.json"),
    ],
)
def test_what_cannot_be_served_is_refused(
    folder: Path, file: str, settings: dict[str, Any], part: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / file, **settings)
    status, facts = check(folder, capsys)
    assert status == 1
    assert facts[part][0] == "refused"
    assert message in facts[part][1]


def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = check(tmp_path / "none", capsys)
    assert (status, list(facts)) == (1, ["model"])


def test_people_get_a_table(tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(tmp_path / "base", "GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=64)
    change(tmp_path / "base" / "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": []})
    assert main(["check", str(tmp_path / "base")]) == 0
    assert "GPT-2 (gpt2)" in capsys.readouterr().out
