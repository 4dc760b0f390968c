"""Logits, hidden states and log probabilities of the prompt equal those of transformers, however the prompt is
chunked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.batch.step import NOTHING, OutputParams, RowTensor, SamplingParams, StepOutput
from gpu_worker.model_runner import ModelRunner
from gpu_worker.scheduler_link.outputs import encode_tensors, output_params
from protos import generation_pb2 as pb
from tests.gpu_worker.tiny_models import SHAPE, Driver, ints, make_runner

EVERYTHING = OutputParams(
    prompt_log_probs=3,
    context_logits=True,
    generation_logits=True,
    hidden_states=((0, True), (2, False), (3, True)),
    topk_logits=((5, True),),
    token_logits=(((7, 3), True), ((5,), False)),
)
STEERED = SamplingParams(temperature=0.0, repetition_penalty=1.5, log_probs=1)
NUM_NEW = 6
PROMPT = np.random.default_rng(3).integers(3, SHAPE["vocab_size"], 150).tolist()
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder, kernels=request.param)


def joined(outputs: Iterable[StepOutput], row: int = 0) -> dict[str, NDArray[Any]]:
    """Join pieces into whole tensors by name; check that the pieces are consecutive."""
    parts: defaultdict[str, list[RowTensor]] = defaultdict(list)
    for output in outputs:
        for tensor in output.tensors:
            if tensor.row == row:
                assert tensor.first_row == sum(len(part.values) for part in parts[tensor.name])
                parts[tensor.name].append(tensor)
    for name, pieces in parts.items():
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [name.startswith("context_")]
    return {name: np.concatenate([piece.values for piece in pieces]) for name, pieces in parts.items()}


def run(driver: Driver, chunk: int, beside: int = 0) -> list[StepOutput]:
    """Run the prompt in chunks alongside a decoding row, and then the output."""
    others = [1] if beside else []
    if beside:
        driver.step([driver.sequence(1, PROMPT[:beside])], [(1, 0, beside)])
    outputs, new = [], [driver.sequence(0, PROMPT, STEERED, outputs=EVERYTHING)]
    for start in range(0, len(PROMPT), chunk):
        outputs.append(driver.step(new, [(0, start, min(chunk, len(PROMPT) - start))], generation=others))
        new = []
    return outputs + [driver.step(generation=[0, *others]) for _ in range(NUM_NEW - 1)]


def test_they_equal_transformers(tiny_folder: Path, runner: ModelRunner) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    driver = Driver(runner)
    outputs = run(driver, 40)
    with torch.inference_mode():
        known = model(torch.tensor([driver.tokens[0][:-1]]), output_hidden_states=True)
    logits, states = known.logits[0], [layer[0] for layer in known.hidden_states]
    prompt, output = slice(0, len(PROMPT)), slice(len(PROMPT) - 1, len(PROMPT) + NUM_NEW - 1)
    top = logits.topk(5)
    expected = {
        "context_logits": logits[prompt],
        "generation_logits": logits[output],
        "context_hidden_states.0": states[0][prompt],
        "hidden_states.0": states[0][output],
        "hidden_states.2": states[2][output],
        "context_hidden_states.3": states[3][prompt],
        "hidden_states.3": states[3][output],
        "context_topk_logits.5": top.values[prompt],
        "topk_logits.5": top.values[output],
        "context_token_logits.7.3": logits[prompt][:, [7, 3]],
        "token_logits.7.3": logits[output][:, [7, 3]],
        "token_logits.5": logits[output][:, [5]],
    }
    found = joined(outputs)
    ids = {name: values for name, values in found.items() if name.endswith("ids")}
    assert found.keys() - ids.keys() == expected.keys()
    # Rounding may change the order of equal logits, so the logits of the reported tokens are compared instead of their
    # ids.
    for name, rows in (("context_topk_logits.5", prompt), ("topk_logits.5", output)):
        assert ids[f"{name}.ids"].dtype == np.int32
        by_id = logits[rows].gather(1, torch.from_numpy(ids[f"{name}.ids"]).long())
        np.testing.assert_allclose(by_id, top.values[rows], atol=TOLERANCE * float(logits.abs().max()))
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], values.numpy(), atol=TOLERANCE * float(logits.abs().max()))
    log_probs = logits.log_softmax(dim=1)[: len(PROMPT) - 1]
    own = log_probs.gather(1, torch.tensor(PROMPT[1:])[:, None])
    items = [item for step in outputs for item in step.prompt_log_probs]
    np.testing.assert_allclose([x for i in items for x in i.token_log_probs], own.flatten(), atol=1e-3)
    ranks = torch.tensor([x for i in items for x in i.token_ranks])
    least, most = ((log_probs > own + gap).sum(dim=1) + 1 for gap in (1e-3, -1e-3))
    assert bool(((least <= ranks) & (ranks <= most)).all())
    likeliest = torch.tensor([x for i in items for x in i.top_token_ids]).view(-1, 3)
    np.testing.assert_allclose(log_probs.gather(1, likeliest), log_probs.topk(3).values, atol=1e-3)


def test_the_split_of_the_prompt_changes_no_bits(runner: ModelRunner) -> None:
    def flat(outputs: list[StepOutput]) -> list[float]:
        return [value for step in outputs for item in step.prompt_log_probs for value in item.token_log_probs]

    whole = run(Driver(runner), 1000)
    for chunk, beside in ((1, 0), (47, 0), (128, 30)):
        parts = run(Driver(runner), chunk, beside)
        for name, values in joined(whole).items():
            assert np.array_equal(joined(parts)[name], values), name
        assert flat(parts) == flat(whole)


def test_requested_outputs_change_no_token_and_appear_only_in_that_request(runner: ModelRunner) -> None:
    driver = Driver(runner)
    outputs = run(driver, 64, beside=20)
    assert {tensor.row for step in outputs for tensor in step.tensors} == {0}
    assert Driver(runner).run_alone(PROMPT, NUM_NEW, STEERED) == driver.output(0)


def test_a_rebuilt_sequence_reports_later_outputs(runner: ModelRunner) -> None:
    driver = Driver(runner)
    whole = joined(run(driver, 64))
    driver = Driver(runner)
    before = [driver.step([driver.sequence(0, PROMPT, STEERED, outputs=EVERYTHING)], [(0, 0, len(PROMPT))])]
    before.append(driver.step(generation=[0]))
    known = driver.tokens[0]
    driver.step(released_rows=ints([0]))
    again = driver.sequence(2, known, STEERED, num_prompt_tokens=len(PROMPT), outputs=EVERYTHING)
    after = [driver.step([again], [(2, 0, len(known))])]
    after += [driver.step(generation=[2]) for _ in range(NUM_NEW - 3)]
    assert not any(output.prompt_log_probs for output in after)
    for name, values in joined(before).items():
        rest = [tensor.values for output in after for tensor in output.tensors if tensor.name == name]
        assert np.array_equal(np.concatenate([values, *rest]), whole[name]), name


def test_the_first_sequence_reports_the_prompt(runner: ModelRunner) -> None:
    driver = Driver(runner)
    second = driver.sequence(0, PROMPT, STEERED, outputs=EVERYTHING, sequence_index=1)
    output = driver.step([second], [(0, 0, len(PROMPT))])
    assert not output.prompt_log_probs
    assert not any(tensor.name.startswith("context_") for tensor in output.tensors)


def test_large_tensors_cross_the_wire_in_pieces() -> None:
    values = np.arange(2_000_000, dtype=np.float32).reshape(50, 40_000)
    tensor = RowTensor(4, "context_logits", values, first_row=10, is_last=True)
    messages = list(
        encode_tensors([tensor, RowTensor(5, "topk_logits.1.ids", ints([7]).reshape(1, 1), 0, is_last=False)])
    )
    pieces = [item.tensors[0] for message in messages for item in message if item.row == 4]
    assert all(sum(len(item.tensors[0].data) for item in message) <= 9 << 20 for message in messages)
    assert all(len(piece.data) <= 1 << 20 for piece in pieces)
    assert b"".join(piece.data for piece in pieces) == values.tobytes()
    offset = 10 * 160_000
    for piece in pieces:
        assert piece.data_offset == offset
        assert list(piece.shape) == [len(piece.data) // 160_000, 40_000]
        offset += len(piece.data)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    (ids,) = messages[-1][-1].tensors
    assert (ids.dtype, ids.data) == (pb.Tensor.DTYPE_INT32, b"\x07\0\0\0")


def test_output_params_are_read_from_the_message() -> None:
    config = pb.OutputConfig(prompt_log_probs=0, return_generation_logits=True)
    config.additional_outputs.add(name="hidden_states.12", gather_context=True)
    config.additional_outputs.add(name="topk_logits.4")
    config.additional_outputs.add(name="token_logits.9.0")
    config.additional_outputs.add(name="entropy", gather_context=True, probe_width=2)
    assert output_params(config) == OutputParams(
        prompt_log_probs=0,
        generation_logits=True,
        hidden_states=((12, True),),
        topk_logits=((4, False),),
        token_logits=(((9, 0), False),),
        probes=(("entropy", True),),
    )
    assert output_params(pb.OutputConfig(log_probs=3)) is NOTHING
