"""Beams with other features give the same outputs whatever is lost: worker and scheduler are lost at every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from tokenizers import Tokenizer

from gpu_worker.model_runner import ModelRunner
from protos import generation_pb2 as pb
from scheduler.core.request import FinishReason, Request, SequenceEnd
from tests.faults.small_model import make_small_model
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.tiny_models import make_runner
from tests.seeds.conftest import _write_lora

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "no_repeat_ngram_size": 2}
EVERYTHING = {
    "log_probs": 2,
    "return_generation_logits": True,
    "additional_outputs": [{"name": "topk_logits.2"}],
}
# Fields in addition to those of a beam search; `lora` is an adapter. Stop words and sequences are parts of the output
# without them.
CASES: dict[str, dict[str, object]] = {
    "stop words, penalties": {"sampling": PENALTIES},
    "stop words, adapter, log probabilities": {"output": {"log_probs": 3}, "lora": {"name": "a"}},
    "stop words, logits": {"output": EVERYTHING},
    "stop words, grammar": {
        "guided_decoding": {"guide_type": "GUIDE_TYPE_REGEX", "guide": "([a-f]{1,2} ){2,9}"},
    },
    "stop words, diversity rate": {"sampling": {"beam_search_diversity_rate": 0.7}},
    "stop sequences, bad words, diversity rate": {
        "sampling": {"beam_search_diversity_rate": 1.5, "early_stopping": 2, "min_tokens": 3},
        "stopping": {"bad_word_token_ids": [{"values": [260]}]},
    },
    "grammar, adapter, penalties, logits": {
        "sampling": PENALTIES,
        "guided_decoding": {"guide_type": "GUIDE_TYPE_REGEX", "guide": "[a-z]{1,9}( [a-z]{1,7}){1,3}"},
        "output": EVERYTHING,
        "lora": {"name": "a"},
    },
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModelRunner, Tokenizer, pb.ResolvedAdapter]]:
    folder, adapter = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters") / "a"
    make_small_model(folder)
    _write_lora(adapter)
    runner = make_runner(folder, kv="f32", max_kv_tokens=2048)
    loaded = runner.adapters.load(str(adapter)).result()
    resolved = pb.ResolvedAdapter(
        path=str(adapter), fingerprint=loaded.fingerprint, num_bytes=runner.adapters.size_of(loaded)
    )
    yield runner, Tokenizer.from_file(str(folder / "tokenizer.json")), resolved
    runner.close()


def request_of(name: str, adapter: pb.ResolvedAdapter, stopping: pb.StoppingConfig) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id="b", token_ids=pb.TokenIds(values=range(400, 420)), max_tokens=7)
    request.sampling.beam_width = request.sampling.num_return_sequences = 3
    request.sampling.length_penalty = request.sampling.temperature = 1.0
    ParseDict({field: value for field, value in CASES[name].items() if field != "lora"}, request)
    if "lora" in CASES[name]:
        request.lora.name = "a"
        request.lora.resolved.CopyFrom(adapter)
    request.stopping.ignore_eos = True
    request.stopping.MergeFrom(stopping)
    return request


def stops_in(name: str, made: Request, tokenizer: Tokenizer) -> pb.StoppingConfig:
    """Return a stop word or stop sequence that is in the middle of the best beam."""
    tokens = made.sequences[0].output.tolist()
    if "sequences" in name:
        return pb.StoppingConfig(stop_word_token_ids=[pb.TokenIds(values=tokens[3:5])])
    if "stop words" not in name:
        return pb.StoppingConfig()
    texts = (tokenizer.decode(tokens[: count + 1]).replace("\ufffd", "").strip() for count in range(2, len(tokens)))
    return pb.StoppingConfig(stop_words=[next(text for text in texts if text)[-1]])


def ends(made: Request) -> list[SequenceEnd | None]:
    return [sequence.end for sequence in made.sequences]


@pytest.mark.parametrize("name", CASES)
def test_beams_with_other_features_are_the_same_despite_losses(
    small: tuple[ModelRunner, Tokenizer, pb.ResolvedAdapter], tmp_path: Path, name: str
) -> None:
    runner, tokenizer, adapter = small
    (plain,) = CoreWithRunners(runner, ()).run([request_of(name, adapter, pb.StoppingConfig())])
    request = request_of(name, adapter, stops_in(name, plain, tokenizer))
    (alone,) = CoreWithRunners(runner, ()).run([request])
    expected = contents(alone)
    num_stopped = sum(end is not None and end.reason is FinishReason.STOP for end in ends(alone))
    assert num_stopped or "stop" not in name
    assert any(end is not None and bool(end.stop_word) for end in ends(alone)) == ("stop words" in name)
    for number in itertools.count(1):
        system = CoreWithRunners(runner, (), max_num_tokens=16, journal=tmp_path / str(number))
        system.submit(request)
        if not all(system.step() for _ in range(number)):
            assert number > 6
            break
        for part in ("worker", "scheduler")[:: 1 if number % 2 else -1]:
            getattr(system, f"lose_{part}")()
            system.step()
        system.run([])
        made = system.core.lifecycle.requests["b"]
        assert (contents(made), ends(made)) == (expected, ends(alone)), number
