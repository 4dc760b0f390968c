"""Request features on the embedded model, all in one batch, compared with transformers on the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.tiny_models import make_runner

PROMPTS = ("One, two, three. One, two, three. One,", "Here is a short list of colors: red, green,", "The sun")
VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 49_152, 576, 30
END_ID = 28  # a comma, which is a frequent token
MAX_TOKENS = 14
# Logits of about 20 may differ by this much after thirty layers whose sums are computed in another order.
BOUND = 2e-3
Change = Callable[[list[int], list[int], Tensor], Tensor]


def by_transformers(make: Callable[[int], Any]) -> Change:
    """Return a function that applies the logits processor of transformers that `make` creates for the number of prompt
    tokens.
    """
    return lambda prompt, output, scores: make(len(prompt))(torch.tensor([[*prompt, *output]]), scores)


def penalized(presence: float, frequency: float) -> Change:
    def change(prompt: list[int], output: list[int], scores: Tensor) -> Tensor:
        for token, count in Counter(output).items():
            scores[0, token] -= presence + frequency * count
        return scores

    return change


BAD_WORDS = [[28, 827], [2644], [260, 253]]
BIAS = {284: 3.5, 1229: -2.0, 30: 2.0}
STEERED: dict[str, tuple[dict[str, Any], Change]] = {
    "repetition": (
        {"sampling": {"repetition_penalty": 1.3}},
        by_transformers(lambda _: transformers.RepetitionPenaltyLogitsProcessor(1.3)),
    ),
    "presence and frequency": (
        {"sampling": {"presence_penalty": 1.5, "frequency_penalty": 2.0}},
        penalized(1.5, 2.0),
    ),
    "n-grams": (
        {"sampling": {"no_repeat_ngram_size": 2}},
        by_transformers(lambda _: transformers.NoRepeatNGramLogitsProcessor(2)),
    ),
    "bad words": (
        {"stopping": {"bad_word_token_ids": [pb.TokenIds(values=word) for word in BAD_WORDS]}},
        by_transformers(lambda _: transformers.NoBadWordsLogitsProcessor(BAD_WORDS, [END_ID + 1_000])),
    ),
    "min tokens": (
        {"sampling": {"min_tokens": 9}},
        by_transformers(lambda length: transformers.MinNewTokensLengthLogitsProcessor(length, 9, [END_ID])),
    ),
    "bias": (
        {"sampling": {"embedding_bias": BIAS}},
        by_transformers(lambda _: transformers.SequenceBiasLogitsProcessor({(k,): v for k, v in BIAS.items()})),
    ),
}
# The limits in transformers are slightly wider, since rounding may include or exclude a token at the edge.
DRAWN: dict[str, tuple[dict[str, Any], float, Any]] = {  # applied after the temperature
    "top-k": ({"top_k": 3}, 1.0, transformers.TopKLogitsWarper(3)),
    "top-p": ({"top_p": 0.6}, 1.0, transformers.TopPLogitsWarper(0.601)),
    "min-p": ({"min_p": 0.2}, 1.0, transformers.MinPLogitsWarper(0.199)),
    "temperature": ({"temperature": 0.6, "top_p": 0.8}, 0.6, transformers.TopPLogitsWarper(0.801)),
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("smollm2", activations="f32", max_batch_size=64, max_sequence_length=512)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def request(number: str, prompt: list[int], sampling: dict[str, Any], **parts: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(request_id=number, max_tokens=MAX_TOKENS, sampling=pb.SamplingConfig(**sampling), **parts)
    made.token_ids.values.extend(prompt)
    return made


def logits_of(model: Any, prompt: list[int], output: list[int]) -> Tensor:
    """Return the logits that transformers computes for the position of each token of `output`."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([[*prompt, *output[:-1]]]), logits_to_keep=len(output)).logits[0]
    return logits.clone()


def test_steered_tokens_are_those_of_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]]
) -> None:
    """Each greedy token has the highest logit after transformers' processors, and each feature has an effect."""
    cases = [(name, prompt) for name in ("", *STEERED) for prompt in prompts]
    requests = []
    for i, (name, prompt) in enumerate(cases):
        fields: dict[str, Any] = STEERED[name][0] if name else {}
        stopping = pb.StoppingConfig(end_id=END_ID, ignore_eos=name != "min tokens", **fields.get("stopping", {}))
        sampling = {"temperature": 0, **fields.get("sampling", {})}
        requests.append(request(str(i), prompt, sampling, stopping=stopping))
    found = [contents(made)[0].tokens for made in CoreWithRunners(runner, ()).run(requests)]
    changed = set()
    for (name, prompt), output in zip(cases, found, strict=True):
        for place, logits in enumerate(logits_of(transformers_model, prompt, output)):
            known = output[:place]
            scores = STEERED[name][1](prompt, known, logits[None].clone())[0] if name else logits
            assert float(scores.max() - scores[output[place]]) < BOUND, (name, place)
            changed |= {name} if scores.argmax() != logits.argmax() else set()
    assert changed == STEERED.keys()
    lengths = [len(output) for (name, _), output in zip(cases, found, strict=True) if name == "min tokens"]
    assert min(lengths) >= 10


def test_drawn_tokens_are_among_those_that_transformers_leaves(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]]
) -> None:
    cases = [(name, prompt) for name in DRAWN for prompt in prompts]
    stopping = pb.StoppingConfig(ignore_eos=True)
    requests = [
        request(str(i), prompt, {"seed": i, **DRAWN[name][0]}, stopping=stopping)
        for i, (name, prompt) in enumerate(cases)
    ]
    num_others: Counter[str] = Counter()
    for (name, prompt), made in zip(cases, CoreWithRunners(runner, ()).run(requests), strict=True):
        output = contents(made)[0].tokens
        logits = logits_of(transformers_model, prompt, output)
        places = torch.arange(len(output))
        _, temperature, warper = DRAWN[name]
        left = warper(None, logits / temperature)
        assert bool(left[places, output].isfinite().all()), name
        assert left.isinf().any()
        num_others[name] += int((logits.argmax(dim=1) != torch.tensor(output)).sum())
    assert num_others.keys() == DRAWN.keys()
    assert min(num_others.values()) > 0


def test_reported_outputs_equal_those_of_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]]
) -> None:
    output_config = pb.OutputConfig(
        log_probs=4, prompt_log_probs=2, return_context_logits=True, return_generation_logits=True
    )
    for layer in (0, 17, NUM_LAYERS):
        output_config.additional_outputs.add(name=f"hidden_states.{layer}", gather_context=True)
    sampling = {"temperature": 0.8, "repetition_penalty": 1.2}
    requests = [
        request(str(i), prompt, {"seed": i, **sampling}, output=output_config) for i, prompt in enumerate(prompts)
    ]
    for prompt, made in zip(prompts, CoreWithRunners(runner, ()).run(requests), strict=True):
        (found,) = contents(made)
        with torch.inference_mode():
            known = transformers_model(torch.tensor([[*prompt, *found.tokens[:-1]]]), output_hidden_states=True)
        logits, first = known.logits[0], len(prompt) - 1
        assert_equal(found.array("context_logits", VOCAB_SIZE), logits[: len(prompt)])
        assert_equal(found.array("generation_logits", VOCAB_SIZE), logits[first:])
        for layer in (0, 17, NUM_LAYERS):
            states = known.hidden_states[layer][0]
            assert_equal(found.array(f"context_hidden_states.{layer}", HIDDEN_SIZE), states[: len(prompt)])
            assert_equal(found.array(f"hidden_states.{layer}", HIDDEN_SIZE), states[first:])
        log_probs = logits.log_softmax(dim=1)
        assert_log_probs(found.log_probs, found.tokens, log_probs[first:], 4)
        assert_log_probs(found.prompt_log_probs, prompt[1:], log_probs[:first], 2)


def assert_equal(actual: np.ndarray[Any, Any], expected: Tensor) -> None:
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-4 * float(expected.abs().max()))


def assert_log_probs(found: list[Any], tokens: list[int], log_probs: Tensor, top_k: int) -> None:
    assert len(found) == len(tokens)
    for (value, rank, top), token, row in zip(found, tokens, log_probs, strict=True):
        assert value == pytest.approx(float(row[token]), abs=BOUND)
        assert int((row > row[token] + BOUND).sum()) < rank <= int((row > row[token] - BOUND).sum())
        values = [float(row[other]) for other, _ in top]
        assert [value for _, value in top] == pytest.approx(values, abs=BOUND)
        assert values == pytest.approx(row.topk(top_k).values.tolist(), abs=BOUND)
