"""Output probes: their values are reported under their names, and a failing probe fails only its own request."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampling import output_probes
from gpu_worker.sampling.output_probes import load_output_probes
from midstream.errors import ConfigError
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import Contents, CoreWithRunners, contents
from tests.gpu_worker.tiny_models import SHAPE, make_runner, make_tiny_model

EXAMPLE = Path(__file__).parent / "example_probes"
WIDTHS = {"TopKLogits": 3, "entropy": 2, "raises": 1}
PROMPT = [5, 9, 40, 3, 77, 8, 120]


def offer(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """Register probes in the way that installed packages do."""
    offered = [EntryPoint(name, place, output_probes.ENTRY_POINT_GROUP) for name, place in places.items()]
    monkeypatch.setattr(output_probes, "entry_points", lambda group: offered)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Module, ModelRunner]:
    monkeypatch.syspath_prepend(EXAMPLE)
    names = {"TopKLogits": "TopKLogits", "entropy": "Entropy", "raises": "Raises"}
    offer(monkeypatch, **{name: f"named_outputs:{kind}" for name, kind in names.items()})
    model = make_tiny_model(tmp_path, "Llama")
    return model, make_runner(tmp_path, max_num_tokens=4)


def request(name: str, *probes: str) -> pb.GenerateRequest:
    made = pb.GenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(values=PROMPT),
        max_tokens=4,
        sampling=pb.SamplingConfig(temperature=0),
        stopping=pb.StoppingConfig(ignore_eos=True),
    )
    for probe in probes:
        made.output.additional_outputs.add(name=probe, gather_context=True, probe_width=WIDTHS[probe])
    return made


def test_probe_values_are_reported(tiny: tuple[torch.nn.Module, ModelRunner]) -> None:
    """Values are reported for the prompt and the output, in a batch with other requests, with prompt chunks of at most
    4 tokens.
    """
    model, runner = tiny
    both, plain = CoreWithRunners(runner, (2,)).run([request("a", "TopKLogits", "entropy"), request("b")])
    (made,) = contents(both)
    assert contents(plain) == [Contents(made.tokens, made.reason, None, None)]
    with torch.no_grad():
        tokens = torch.tensor([PROMPT + made.tokens])
        logits = model(tokens).logits[0, :-1]
        embeddings = model.get_input_embeddings()(tokens)[0, :-1]  # type: ignore[operator]
    log_probs = logits.log_softmax(dim=1)
    entropy = torch.stack([-(log_probs.exp() * log_probs).sum(dim=1), embeddings.norm(dim=1)], dim=1)
    expected = {"TopKLogits": logits.topk(3, dim=1).values, "entropy": entropy}
    for name, values in expected.items():
        context = torch.tensor(made.array(f"context_{name}", WIDTHS[name]))
        output = torch.tensor(made.array(name, WIDTHS[name]))
        assert torch.allclose(context, values[: len(PROMPT)], atol=2e-3)
        assert torch.allclose(output, values[len(PROMPT) - 1 :], atol=2e-3)


def test_one_that_fails_fails_only_its_own_request(tiny: tuple[torch.nn.Module, ModelRunner]) -> None:
    _, runner = tiny
    bad, good = CoreWithRunners(runner, (2,)).run([request("a", "raises"), request("b", "TopKLogits")])
    assert bad.failure is not None
    assert "RuntimeError: no idea" in bad.failure.message
    assert contents(good)[0].array("TopKLogits", 3).shape == (4, 3)


def test_one_missing_on_a_worker_is_named(tiny: tuple[torch.nn.Module, ModelRunner]) -> None:
    _, runner = tiny
    wanted = request("a")
    wanted.output.additional_outputs.add(name="nothing", probe_width=1)
    (refused,) = CoreWithRunners(runner, (2,)).run([wanted])
    assert refused.failure is not None
    assert refused.failure.field == "output.additional_outputs.name"


@pytest.mark.parametrize("place", ["nowhere:Nothing", "json:JSONDecoder"])
def test_an_entry_point_that_is_not_a_probe_is_rejected(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mine=place)
    with pytest.raises(ConfigError, match="mine"):
        load_output_probes(SHAPE["num_hidden_layers"])
