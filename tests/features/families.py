"""Run each feature on a tiny random model of each family, and return the outcome."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gpu_worker.model_runner import ModelRunner
from midstream.errors import UnsupportedError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from scheduler.core.failure import Failure
from tests.gpu_worker.core_with_runners import Contents, CoreWithRunners, contents
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

VOCAB_SIZE, HIDDEN_SIZE = 49_152, 64
PROMPT = [504, 2365, 282, 504, 2365, 282, 504, 2365]
# Name of each family in transformers, and the settings of its tiny model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmo": ("Olmo", {}),
}
POST_PROCESSORS = Path(__file__).parents[1] / "gpu_worker" / "example_post_processor"


class Family:
    """One model and its runner. The package `polite_logits` must be importable."""

    def __init__(self, name: str, folder: Path) -> None:
        family, settings = MODELS[name]
        make_tiny_model(folder, family, vocab_size=VOCAB_SIZE, **settings)
        embedded = open_model_folder("smollm2").path
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded / file, folder / file)
        self._lora = _write_lora(folder / "lora", 4 * settings.get("head_dim", 16))
        self.runner: ModelRunner = make_runner(
            folder, logits_post_processors="count_up=polite_logits:CountUp", max_num_tokens=256
        )
        self._num_requests = 0
        self.plain = self.run(self.request())[0].tokens

    def close(self) -> None:
        """Stop the grammar process."""
        self.runner.close()

    def request(self, **fields: Any) -> pb.GenerateRequest:
        """Return a greedy request."""
        self._num_requests += 1
        base = pb.GenerateRequest(
            request_id=f"r{self._num_requests}",
            token_ids=pb.TokenIds(values=PROMPT),
            max_tokens=6,
            sampling=pb.SamplingConfig(temperature=0, seed=1),
            stopping=pb.StoppingConfig(ignore_eos=True),
        )
        base.MergeFrom(pb.GenerateRequest(**fields))
        return base

    def run(self, request: pb.GenerateRequest) -> list[Contents]:
        """Run a request alone.

        Raises:
            RefusedError: The request ended in an error.
        """
        (made,) = CoreWithRunners(self.runner, (0,)).run([request])
        if made.failure is not None:
            raise RefusedError(made.failure)
        return contents(made)

    def lora(self) -> pb.LoraConfig:
        """Load an adapter, and return the reference that the scheduler would send for it."""
        adapter = self.runner.adapters.load(str(self._lora)).result()
        resolved = pb.ResolvedAdapter(
            path=str(self._lora), fingerprint=adapter.fingerprint, num_bytes=self.runner.adapters.size_of(adapter)
        )
        return pb.LoraConfig(name="lora", resolved=resolved)


class RefusedError(Exception):
    """The request ended in an error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)


def outcome(family: Family, feature: str) -> str:
    """Run a feature and check its effect; return `works` or `refused`."""
    try:
        CHECKS[feature](family)
    except (UnsupportedError, RefusedError):
        return "refused"
    return "works"


def _sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingConfig(**fields)}


def _seeded(family: Family) -> None:
    drawn = [family.run(family.request(**_sampling(temperature=2.0, seed=seed)))[0].tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def _sequences(family: Family) -> None:
    made = family.run(family.request(**_sampling(temperature=2.0, num_return_sequences=3)))
    assert len({tuple(item.tokens) for item in made}) == 3


def _beams(family: Family) -> None:
    request = family.request(**_sampling(temperature=1.0, beam_width=3, num_return_sequences=3))
    request.output.log_probs = 0
    made = family.run(request)
    scores = [item.cumulative_log_prob or 0.0 for item in made]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(item.tokens) for item in made}) == 3


def _same(**fields: Any) -> Callable[[Family], None]:
    def check(family: Family) -> None:
        assert family.run(family.request(**fields))[0].tokens == family.plain

    return check


def _penalties(family: Family) -> None:
    (made,) = family.run(family.request(**_sampling(repetition_penalty=1e3, presence_penalty=2.0)))
    assert len({*made.tokens, *PROMPT}) == 6 + len(set(PROMPT))


def _bias(family: Family) -> None:
    request = family.request()
    request.sampling.embedding_bias[7] = 1e4
    assert family.run(request)[0].tokens == [7] * 6


def _allowed_tokens(family: Family) -> None:
    allowed = [token for token in range(5, 20) if token not in family.plain]
    assert set(family.run(family.request(**_sampling(allowed_token_ids=allowed)))[0].tokens) <= set(allowed)


def _bad_words(family: Family) -> None:
    banned = family.plain[0]
    request = family.request(stopping=pb.StoppingConfig(bad_word_token_ids=[pb.TokenIds(values=[banned])]))
    assert banned not in family.run(request)[0].tokens


def _ngrams(family: Family) -> None:
    tokens = PROMPT + family.run(family.request(**_sampling(no_repeat_ngram_size=2)))[0].tokens
    pairs = list(itertools.pairwise(tokens[len(PROMPT) - 1 :]))
    known = set(itertools.pairwise(PROMPT))
    assert len(set(pairs)) == len(pairs)
    assert not known & set(pairs)


def _stop_tokens(family: Family) -> None:
    made = family.run(family.request(stopping=pb.StoppingConfig(stop_token_ids=[family.plain[0]])))
    assert (made[0].tokens, made[0].stop_token_id) == (family.plain[:1], family.plain[0])
    waits = family.run(
        family.request(stopping=pb.StoppingConfig(stop_token_ids=[family.plain[0]]), **_sampling(min_tokens=3))
    )
    assert len(waits[0].tokens) >= 3


def _log_probs(family: Family) -> None:
    (made,) = family.run(family.request(output=pb.OutputConfig(log_probs=2, return_generation_logits=True)))
    logits = torch.tensor(made.array("generation_logits", VOCAB_SIZE))
    expected = logits.log_softmax(dim=1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
    np.testing.assert_allclose([row[0] for row in made.log_probs], expected, atol=1e-4)
    assert [row[1] for row in made.log_probs] == [1] * 6


def _prompt_log_probs(family: Family) -> None:
    (made,) = family.run(family.request(output=pb.OutputConfig(prompt_log_probs=1, return_context_logits=True)))
    logits = torch.tensor(made.array("context_logits", VOCAB_SIZE))
    assert len(logits) == len(PROMPT)
    expected = logits[:-1].log_softmax(dim=1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    np.testing.assert_allclose([row[0] for row in made.prompt_log_probs], expected, atol=1e-4)


def _additional(family: Family) -> None:
    request = family.request(output=pb.OutputConfig(return_generation_logits=True))
    request.output.additional_outputs.add(name="hidden_states.1", gather_context=True)
    request.output.additional_outputs.add(name="topk_logits.4")
    (made,) = family.run(request)
    assert made.array("hidden_states.1", HIDDEN_SIZE).shape == (6, HIDDEN_SIZE)
    assert made.array("context_hidden_states.1", HIDDEN_SIZE).shape == (len(PROMPT), HIDDEN_SIZE)
    logits = torch.tensor(made.array("generation_logits", VOCAB_SIZE))
    np.testing.assert_array_equal(made.array("topk_logits.4", 4), logits.topk(4, dim=1).values)


def _guided(family: Family) -> None:
    guide = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="[0-9]{12}")
    (made,) = family.run(family.request(guided_decoding=guide))
    digits = set(range(32, 42))  # single tokens in the vocabulary of the embedded model
    assert len(made.tokens) == 6
    assert set(made.tokens) <= digits


def _post_processor(family: Family) -> None:
    (made,) = family.run(family.request(logits_post_processor_name="count_up", client_id="abc"))
    assert made.tokens == [PROMPT[-1] + 3 * (place + 1) for place in range(6)]


def _lora(family: Family) -> None:
    assert family.run(family.request(lora=family.lora()))[0].tokens != family.plain


def _table(rows: int) -> pb.Tensor:
    values = np.random.default_rng(1).normal(0, 1, (rows, HIDDEN_SIZE)).astype(np.float32)
    return pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=values.shape, data=values.tobytes())


def _prompt_tuning(family: Family) -> None:
    request = family.request(prompt_tuning=pb.PromptTuningConfig(table=_table(2)))
    request.token_ids.values[:0] = [VOCAB_SIZE, VOCAB_SIZE + 1]
    assert family.run(request)[0].tokens != family.plain


def _embeddings(family: Family) -> None:
    request = family.request(prompt_tuning=pb.PromptTuningConfig(table=_table(5)))
    request.token_ids.values[:] = [VOCAB_SIZE + row for row in range(5)]
    assert family.run(request)[0].tokens != family.plain


def _drafts(family: Family) -> None:
    drafts = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=3)
    assert family.run(family.request(speculative=drafts))[0].tokens == family.plain


RETENTION = pb.KvRetentionConfig(token_ranges=[pb.KvRetentionConfig.TokenRange(start=0, priority=90)])
CHECKS: dict[str, Callable[[Family], None]] = {
    "seeded": _seeded,
    "sequences": _sequences,
    "beams": _beams,
    "penalties": _penalties,
    "bias": _bias,
    "allowed_tokens": _allowed_tokens,
    "bad_words": _bad_words,
    "ngrams": _ngrams,
    "top_p_decay": _same(**_sampling(temperature=1.0, top_p=1e-6, top_p_decay=0.5)),
    "stop_tokens": _stop_tokens,
    "log_probs": _log_probs,
    "prompt_log_probs": _prompt_log_probs,
    "context_logits": _prompt_log_probs,
    "generation_logits": _log_probs,
    "additional_outputs": _additional,
    "guided": _guided,
    "post_processor": _post_processor,
    "lora": _lora,
    "prompt_tuning": _prompt_tuning,
    "prompt_embeddings": _embeddings,
    "drafts": _drafts,
    "retention": _same(kv_retention=RETENTION),
    "priority": _same(priority=7),
    "cache_salt": _same(cache_salt="mine"),
}


def _write_lora(folder: Path, num_outputs: int) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{{}}.weight"
        tensors[name.format("A")] = torch.randn(4, HIDDEN_SIZE, generator=generator)
        tensors[name.format("B")] = torch.randn(num_outputs, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
