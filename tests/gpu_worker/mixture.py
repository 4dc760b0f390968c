"""Requests to the embedded model with random features."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpu_worker.model_runner import ModelRunner
from protos import generation_pb2 as pb

VOCAB_SIZE, HIDDEN_SIZE = 49_152, 576
NUM_VIRTUAL = 3
PROMPTS = (
    "A river is",
    "Once upon a time there was a fox who lived",
    "1, 2, 3, 1, 2, 3, 1, 2,",
    "One two three four. One two three four. One two",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of",
)
# There are no commas or full stops between values, because these are stop tokens of some requests.
SCHEMAS = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}',
    '{"type": "array", "items": {"enum": [1, "b", null, true]}, "minItems": 1, "maxItems": 1}',
    '{"anyOf": [{"type": "integer", "minimum": 17, "maximum": 320}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]}',
)
GUIDES = (
    pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="[a-z]{2,8}( [a-z]{1,7}){3}"),
    pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=SCHEMAS[0]),
    pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide='root ::= ("yes" | "no") (", " root)?'),
)
DRAFTS = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=3)


def draw(number: int, prompts: list[list[int]], adapters: dict[str, pb.ResolvedAdapter]) -> pb.GenerateRequest:
    """Return request `number`: sequences or beams, with or without an adapter, and other features that are drawn
    independently.
    """
    rng = random.Random(number)
    request = pb.GenerateRequest(request_id=f"m{number}", max_tokens=rng.randint(3, 6))
    sampling, stopping, output = request.sampling, request.stopping, request.output
    sampling.seed, sampling.temperature = number, rng.choice([0.0, 0.7, 1.3])
    table = _adapt(request, rng.choice(["", "", *adapters, "table"]), number, adapters)
    tokens = rng.choice(prompts)
    request.token_ids.values.extend([*tokens[:2], *table, *tokens[2:]])
    choices: dict[str, Callable[[], object]] = {
        "repetition": lambda: sampling.MergeFrom(pb.SamplingConfig(repetition_penalty=1.2)),
        "penalties": lambda: sampling.MergeFrom(pb.SamplingConfig(frequency_penalty=0.3, presence_penalty=-0.2)),
        "bias": lambda: sampling.embedding_bias.update({100 + number: 4.0, 30: -3.0}),
        "ngrams": lambda: sampling.MergeFrom(pb.SamplingConfig(no_repeat_ngram_size=2)),
        "allowed": lambda: sampling.allowed_token_ids.extend(range(20 + number, 200)),
        "decay": lambda: sampling.MergeFrom(pb.SamplingConfig(top_p=0.95, top_p_decay=0.8, top_p_min=0.3)),
        "cut": lambda: sampling.MergeFrom(pb.SamplingConfig(top_k=40, min_p=0.02)),
        "min_tokens": lambda: sampling.MergeFrom(pb.SamplingConfig(min_tokens=4)),
        "bad_words": lambda: stopping.bad_word_token_ids.extend([pb.TokenIds(values=[260]), pb.TokenIds(values=[253])]),
        "stop_tokens": lambda: stopping.stop_token_ids.extend([28, 30]),
        "ignore_eos": lambda: stopping.MergeFrom(pb.StoppingConfig(ignore_eos=True)),
        "salt": lambda: request.MergeFrom(pb.GenerateRequest(cache_salt=f"{number % 3}", priority=number % 5)),
        "log_probs": lambda: output.MergeFrom(pb.OutputConfig(log_probs=3)),
        "logits": lambda: output.MergeFrom(pb.OutputConfig(return_generation_logits=True)),
        "hidden": lambda: output.additional_outputs.add(name="hidden_states.12", gather_context=True),
        "topk": lambda: output.additional_outputs.add(name="topk_logits.5"),
    }
    if not request.HasField("prompt_tuning"):
        choices["prompt_log_probs"] = lambda: output.MergeFrom(pb.OutputConfig(prompt_log_probs=1))
    for name in rng.sample(sorted(choices), 5):
        choices[name]()
    _draw_sequences(request, rng)
    if rng.random() < 0.3:
        request.speculative.CopyFrom(DRAFTS)
    if rng.random() < 0.3:
        request.guided_decoding.CopyFrom(rng.choice(GUIDES))
        if request.guided_decoding.guide_type == pb.GUIDE_TYPE_JSON_SCHEMA:
            request.guided_decoding.guide = SCHEMAS[number % len(SCHEMAS)]
    if rng.random() < 0.25:
        request.logits_post_processor_name = rng.choice(["count_up", "count_up_together"])
        request.client_id = rng.choice(["ann", "robert"])
    return request


def _adapt(
    request: pb.GenerateRequest, adapter: str, number: int, adapters: dict[str, pb.ResolvedAdapter]
) -> list[int]:
    """Add the adapter to the request; return the virtual tokens for its prompt."""
    if adapter == "table":
        values = np.random.default_rng(number).normal(0, 0.1, (NUM_VIRTUAL, HIDDEN_SIZE)).astype(np.float16)
        tensor = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=values.shape, data=values.tobytes())
        request.prompt_tuning.table.CopyFrom(tensor)
        return list(range(VOCAB_SIZE, VOCAB_SIZE + NUM_VIRTUAL))
    if adapter:
        resolved = adapters[adapter]
        config = request.prompt_tuning if resolved.num_virtual_tokens else request.lora
        config.name = adapter
        config.resolved.CopyFrom(resolved)
    return []


def _draw_sequences(request: pb.GenerateRequest, rng: random.Random) -> None:
    sampling, kind = request.sampling, rng.choice(("one", "one", "several", "beams"))
    if kind == "several":
        sampling.num_return_sequences = rng.randint(2, 3)
    elif kind == "beams":
        sampling.beam_width = rng.randint(2, 4)
        sampling.num_return_sequences = rng.randint(1, sampling.beam_width)
        sampling.length_penalty, sampling.early_stopping = rng.choice([0.0, 1.0]), rng.randint(0, 2)
        sampling.beam_search_diversity_rate = rng.choice([0.0, 0.5])


def resolve(runner: ModelRunner, folder: Path) -> pb.ResolvedAdapter:
    """Load the adapter in `folder` and return it as the scheduler sees a loaded adapter."""
    adapter = runner.adapters.load(str(folder)).result()
    count = 0 if adapter.prompt_table is None else len(adapter.prompt_table)
    return pb.ResolvedAdapter(
        path=str(folder),
        fingerprint=adapter.fingerprint,
        num_bytes=runner.adapters.size_of(adapter),
        num_virtual_tokens=count,
        first_virtual_token=VOCAB_SIZE if count else 0,
    )
