"""Pooled states and scores of encoders, compared with transformers, each text alone and in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.models.encoder import PooledStates, TransformersEncoder
from gpu_worker.models.loader import load_model
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.families import ENCODER_TYPES
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.encoder_models import ENCODERS, make_encoder
from tests.gpu_worker.tiny_models import make_runner

LENGTHS = (1, 2, 17, 40, 5, 61)
TEXTS = [[(7 * place + 11 * length) % 320 + 5 for place in range(length)] for length in LENGTHS]
MODES = ("cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean")
HAS_TYPES = ("Bert", "Electra", "NomicBert")
_numbers = itertools.count()
Floats = np.ndarray[Any, np.dtype[np.float32]]


def compute(core: CoreWithRunners, texts: Sequence[Sequence[int]], name: str) -> list[Floats]:
    """Return the additional output `name` of each text; all texts are submitted at once."""
    requests = []
    for tokens in texts:
        ids = pb.TokenIds(values=tokens)
        request = pb.GenerateRequest(request_id=f"r{next(_numbers)}", max_tokens=1, token_ids=ids)
        output = request.output.additional_outputs.add(name=name)
        if name.startswith("pooled_states."):
            output.probe_width = 64
        requests.append(request)
    return [np.frombuffer(contents(item)[0].tensors[name], np.float32) for item in core.run(requests)]


def pooled(states: torch.Tensor, mode: str) -> Floats:
    """Return the pooled states [tokens, hidden] by the formulas of sentence-transformers."""
    places = torch.arange(1, len(states) + 1)[:, None]
    rows = {
        "cls": states[0],
        "lasttoken": states[-1],
        "mean": states.mean(0),
        "max": states.max(0).values,
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * places).sum(0) / places.sum(),
    }
    found: Floats = rows[mode].numpy()
    return found


@pytest.mark.parametrize("family", ENCODERS)
def test_pooled_states_are_those_of_transformers_in_any_batch(tmp_path: Path, family: str) -> None:
    model = make_encoder(tmp_path, family)
    core = CoreWithRunners(make_runner(tmp_path), ())
    with torch.inference_mode():
        wanted = [model(torch.tensor([tokens])).last_hidden_state[0] for tokens in TEXTS]
    for mode in MODES:
        together = compute(core, TEXTS, f"pooled_states.{mode}")
        for found, states, tokens in zip(together, wanted, TEXTS, strict=True):
            np.testing.assert_allclose(found, pooled(states, mode), rtol=1e-4, atol=1e-4)
            (alone,) = compute(core, [tokens], f"pooled_states.{mode}")
            assert found.tobytes() == alone.tobytes()


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("num_labels", [None, 2])
def test_texts_that_are_computed_together_have_the_results_of_each_alone(
    tmp_path: Path, family: str, num_labels: int | None
) -> None:
    """Steps on a GPU compute texts together."""
    model = make_encoder(tmp_path, family, num_labels)
    folder, cpu = open_model_folder(str(tmp_path)), torch.device("cpu")
    encoder = TransformersEncoder(folder, torch.float32, cpu, packs=True)
    ends = list(itertools.accumulate(LENGTHS))
    flat, unused = torch.tensor(list(itertools.chain(*TEXTS)), dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    starts, sampled = torch.tensor([0, *ends]), torch.tensor(ends) - 1
    probe = Probe(frozenset({encoder.description.num_layers}))
    with torch.inference_mode():
        scores = encoder.forward(ForwardInputs(flat, unused, unused, starts, unused, unused, sampled), probe)
        rows = torch.split(probe.states[encoder.description.num_layers], list(LENGTHS))
        for number, (tokens, states) in enumerate(zip(TEXTS, rows, strict=True)):
            ids = torch.tensor([tokens])
            wanted = model.base_model(ids).last_hidden_state[0]
            np.testing.assert_allclose(states.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-4)
            if num_labels is not None:
                (logits,) = model(ids).logits
                np.testing.assert_allclose(scores[number, :num_labels].numpy(), logits.numpy(), rtol=1e-4, atol=1e-4)


# The heads of MPNet and Camembert are the same with one class.
SCORED = [(family, 3) for family in ENCODERS] + [
    (family, 1) for family in ENCODERS if family not in ("MPNet", "Camembert")
]


@pytest.mark.parametrize(("family", "num_labels"), SCORED)
def test_scores_are_those_of_transformers_in_any_batch(tmp_path: Path, family: str, num_labels: int) -> None:
    model = make_encoder(tmp_path, family, num_labels)
    core = CoreWithRunners(make_runner(tmp_path), ())
    name = ".".join(("token_logits", *map(str, range(num_labels))))
    together = compute(core, TEXTS, name)
    for found, tokens in zip(together, TEXTS, strict=True):
        with torch.inference_mode():
            (wanted,) = model(torch.tensor([tokens])).logits
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)
        (alone,) = compute(core, [tokens], name)
        assert found.tobytes() == alone.tobytes()


def test_the_head_of_modernbert_pools_as_its_settings_say(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "ModernBert", 2, classifier_pooling="mean")
    (found,) = compute(CoreWithRunners(make_runner(tmp_path), ()), [TEXTS[2]], "token_logits.0.1")
    with torch.inference_mode():
        (wanted,) = model(torch.tensor([TEXTS[2]])).logits
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", HAS_TYPES)
def test_ids_above_the_vocabulary_are_tokens_of_the_second_type(tmp_path: Path, family: str) -> None:
    model = make_encoder(tmp_path, family, 1)
    first, second = TEXTS[2], TEXTS[4]
    typed = [*first, *(token + 331 for token in second)]
    core = CoreWithRunners(make_runner(tmp_path), ())
    found, plain = compute(core, [typed, first + second], "token_logits.0")
    types = torch.tensor([[0] * len(first) + [1] * len(second)])
    with torch.inference_mode():
        wanted = model(torch.tensor([first + second]), token_type_ids=types).logits[0]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)
    assert abs(found - plain) > 1e-3


@pytest.mark.parametrize("family", ["Roberta", "MPNet"])
def test_positions_of_padding_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = make_encoder(tmp_path, family)
    tokens = [5, 1, 6, 7, 1]
    (found,) = compute(CoreWithRunners(make_runner(tmp_path), ()), [tokens], "pooled_states.mean")
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), attention_mask=torch.ones(1, 5)).last_hidden_state[0]
    np.testing.assert_allclose(found, states.mean(0).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "longest"), [("Bert", 96), ("Roberta", 94), ("MPNet", 94), ("ModernBert", 96)])
def test_the_longest_text_has_as_many_tokens_as_there_are_positions(tmp_path: Path, family: str, longest: int) -> None:
    model = make_encoder(tmp_path, family)
    runner = make_runner(tmp_path)
    assert runner.max_sequence_length == longest + 1
    tokens = [(place * 3) % 300 + 5 for place in range(longest)]
    (found,) = compute(CoreWithRunners(runner, ()), [tokens], "pooled_states.lasttoken")
    with torch.inference_mode():
        states = model(torch.tensor([tokens])).last_hidden_state[0]
    np.testing.assert_allclose(found, states[-1].numpy(), rtol=1e-4, atol=1e-4)


def test_hidden_states_of_each_layer_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert")
    core = CoreWithRunners(make_runner(tmp_path), ())
    with torch.inference_mode():
        wanted = model(torch.tensor([TEXTS[2]]), output_hidden_states=True).hidden_states
    for layer, states in enumerate(wanted):
        (found,) = compute(core, [TEXTS[2]], f"hidden_states.{layer}")
        np.testing.assert_allclose(found, states[0, -1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batching", ["inflight_fused", "inflight", "static"])
def test_a_text_is_never_split_and_never_begins_with_a_cached_prefix(tmp_path: Path, batching: str) -> None:
    """Two clients share steps that hold one long text and little more; a second round could use cached blocks."""
    model = make_encoder(tmp_path, "Bert")
    core = CoreWithRunners(make_runner(tmp_path, max_num_tokens=96), (), batching=batching)
    texts = [[(place + number) % 300 + 5 for place in range(60 + number)] for number in range(8)]
    with torch.inference_mode():
        wanted = [model(torch.tensor([tokens])).last_hidden_state[0, 0].numpy() for tokens in texts]
    for _ in range(2):
        requests = []
        for number, tokens in enumerate(texts):
            ids = pb.TokenIds(values=tokens)
            name = f"r{next(_numbers)}"
            request = pb.GenerateRequest(request_id=name, max_tokens=1, token_ids=ids, client_id=f"c{number % 2}")
            request.output.additional_outputs.add(name="pooled_states.cls", probe_width=64)
            requests.append(request)
        for item, states in zip(core.run(requests), wanted, strict=True):
            found = np.frombuffer(contents(item)[0].tensors["pooled_states.cls"], np.float32)
            np.testing.assert_allclose(found, states, rtol=1e-4, atol=1e-4)


def test_a_step_must_hold_the_longest_text(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    with pytest.raises(ConfigError, match="is 64; must be at least 96, the longest prompt") as raised:
        make_runner(tmp_path, max_num_tokens=64)
    assert raised.value.field == "max_num_tokens"
    assert make_runner(tmp_path, max_num_tokens=64, max_sequence_length=65).max_num_tokens == 64


@pytest.mark.parametrize("field", ["role", "draft_model", "kv"])
def test_settings_of_the_cache_are_refused(tmp_path: Path, field: str) -> None:
    make_encoder(tmp_path, "Bert")
    value = {"role": "prefill", "draft_model": "x", "kv": "int8"}[field]
    config = WorkerConfig(device="cpu", num_threads=1, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no KV cache") as raised:
        load_model(config, open_model_folder(str(tmp_path)))
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Bert", {"is_decoder": True}, "is_decoder true of config.json is not supported"),
        (
            "NomicBert",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' is not",
        ),
    ],
)
def test_texts_that_would_depend_on_others_are_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], reason: str
) -> None:
    make_encoder(tmp_path, family, **settings)
    with pytest.raises(UnsupportedError, match=reason):
        load_model(WorkerConfig(device="cpu", num_threads=1), open_model_folder(str(tmp_path)))


def test_every_encoder_of_the_table_is_tested() -> None:
    assert {getattr(transformers, f"{name}Config").model_type for name in ENCODERS} == ENCODER_TYPES


def test_other_heads_are_refused(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert")
    model.config.architectures = ["BertForTokenClassification"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="BertForTokenClassification are not served"):
        load_model(WorkerConfig(device="cpu", num_threads=1), open_model_folder(str(tmp_path)))


def test_lower_precision_of_weights_changes_little(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    plain, rounded = (
        compute(CoreWithRunners(make_runner(tmp_path, weights=weights), ()), [TEXTS[3]], "pooled_states.mean")[0]
        for weights in ("auto", "int8")
    )
    assert 0.99 < np.dot(plain, rounded) / np.linalg.norm(plain) / np.linalg.norm(rounded) < 1


def test_pooling_of_one_token_is_the_token() -> None:
    states = torch.randn(1, 8)
    for mode in MODES:
        assert torch.equal(PooledStates(mode, 8, 3).compute({3: states}, states), states)
