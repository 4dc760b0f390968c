"""Scores of models with a classification head, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpu_worker.models.loader import load_model
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.quantized_models import quantize_model
from tests.gpu_worker.tiny_models import SHAPE, make_runner

PROMPT = list(range(3, 40))


def make_classifier(folder: Path, family: str, num_labels: int, **settings: Any) -> Any:
    """Write a random classifier of `family` to `folder`, and return transformers' model."""
    torch.manual_seed(num_labels)
    config = getattr(transformers, f"{family}Config")(**SHAPE, num_labels=num_labels, **settings)
    model: Any = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that any mistake is visible in the scores.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name:
                parameter.add_(1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return model


def check_scores(folder: Path, model: Any, num_labels: int, **settings: Any) -> None:
    """Check that the first logits after PROMPT are the scores of transformers' `model`."""
    runner = make_runner(folder, activations="f32", kv="f32", **settings)
    name = ".".join(("token_logits", *map(str, range(num_labels))))
    request = pb.GenerateRequest(request_id="r", max_tokens=1, token_ids=pb.TokenIds(values=PROMPT))
    request.output.additional_outputs.add(name=name)
    (made,) = CoreWithRunners(runner, ()).run([request])
    with torch.inference_mode():
        (wanted,) = model(torch.tensor([PROMPT])).logits
    found = np.frombuffer(contents(made)[0].tensors[name], np.float32)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "num_labels", "settings"),
    [
        ("Llama", 1, {}),
        ("Qwen3", 3, {"tie_word_embeddings": True, "head_dim": 32}),
        # The logits of this family's language models have a softcap, unlike those of its classifiers.
        ("Gemma2", 2, {"head_dim": 32, "query_pre_attn_scalar": 32, "final_logit_softcapping": 0.1}),
    ],
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_first_logits_are_those_of_the_classes(
    tmp_path: Path, family: str, num_labels: int, settings: dict[str, Any], kernels: str
) -> None:
    model = make_classifier(tmp_path, family, num_labels, **settings)
    check_scores(tmp_path, model, num_labels, kernels=kernels)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_a_quantized_head_gives_its_scores(tmp_path: Path, scheme: str) -> None:
    model = make_classifier(tmp_path, "Llama", 3)
    quantize_model(tmp_path, model, scheme, left_alone="embed")
    check_scores(tmp_path, model, 3)


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    make_classifier(tmp_path, "Llama", 2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b", "2": "c"}}))
    with pytest.raises(ConfigError, match=r"score.weight is \(2, 64\); must be \(3, 64\)"):
        load_model(WorkerConfig(device="cpu", num_threads=1), open_model_folder(str(tmp_path)))


def test_a_classifier_that_needs_transformers_implementation_is_refused(tmp_path: Path) -> None:
    make_classifier(tmp_path, "Llama", 2)
    config = WorkerConfig(device="cpu", implementation="transformers")
    with pytest.raises(UnsupportedError, match="classification head"):
        load_model(config, open_model_folder(str(tmp_path)))
