"""Virtual tokens: PEFT's prompt adapters, tables in requests, and prompt embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.batch.step import NewSequence, Step
from gpu_worker.lora.messages import AdapterMessages, table_of
from gpu_worker.model_runner import ModelRunner
from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from protos import worker_pb2
from tests.gpu_worker.adapters import adapted, make_lora, make_prompt, no_adapters, ref_of
from tests.gpu_worker.test_families import MODELS, OTHER_TYPES
from tests.gpu_worker.test_models import TOLERANCE, Recorder, prompt
from tests.gpu_worker.tiny_models import SHAPE, Driver, ints, make_runner, make_tiny_model

VOCAB = SHAPE["vocab_size"]
NUM_VIRTUAL, NUM_NEW = 5, 5
VIRTUAL = list(range(VOCAB, VOCAB + NUM_VIRTUAL))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("prompt")
    model = make_tiny_model(folder / "model", "Llama")
    make_prompt(model, folder / "soft", 1, NUM_VIRTUAL)
    make_lora(model, folder / "lora", 2, r=4, target_modules=["q_proj"])
    return model, folder


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, model_folder: tuple[torch.nn.Module, Path]) -> ModelRunner:
    return make_runner(model_folder[1] / "model", kernels=request.param)


def expected(model_folder: tuple[torch.nn.Module, Path], tokens: list[int]) -> Tensor:
    """Return PEFT's logits for the real tokens, without those for the virtual tokens before them."""
    model, folder = model_folder
    with adapted(model, folder / "soft") as made, torch.no_grad():
        logits: Tensor = made(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens))).logits[0]
    return logits[NUM_VIRTUAL:]


def test_a_prompt_adapter_computes_what_peft_does(
    model_folder: tuple[torch.nn.Module, Path], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    tokens, plain = prompt(20, seed=1), prompt(9, seed=2)
    soft = replace(driver.sequence(1, VIRTUAL + tokens), prompt=ref_of(runner, model_folder[1] / "soft"))
    driver.step([soft, driver.sequence(0, plain)], [(1, 0, 25), (0, 0, 9)])
    driver.step(generation=[0, 1])
    wanted = expected(model_folder, driver.tokens[1][NUM_VIRTUAL:])
    for logits, position in ((recorder.logits[0][0], 19), (recorder.logits[1][1], 20)):
        error = float((logits - wanted[position]).abs().max())
        assert error <= TOLERANCE * float(wanted[position].abs().max())
    assert driver.output(0) == Driver(runner).run_alone(plain, 2)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("granite", {}),
        ("granitemoeshared", {}),
        ("granitemoe", {"embedding_multiplier": 6.0}),
        ("granite_hybrid", {}),
        ("gemma", {}),
        ("falcon_h1", {}),
    ],
)
def test_embeddings_are_scaled_where_transformers_scales_them(
    name: str, settings: dict[str, object], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, shape = (MODELS | OTHER_TYPES)[name]
    model = make_tiny_model(tmp_path / "model", family, **{**shape, **settings})
    make_prompt(model, tmp_path / "soft", 1, NUM_VIRTUAL)
    runner = make_runner(tmp_path / "model", kernels=kernels, kv="f32")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    tokens, table = prompt(20, seed=1), torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    soft = replace(driver.sequence(0, VIRTUAL + tokens), prompt=ref_of(runner, tmp_path / "soft"))
    embedded = replace(driver.sequence(1, list(range(VOCAB, VOCAB + 12))), prompt_table=table.numpy())
    driver.step([soft, embedded], [(0, 0, 25), (1, 0, 12)])
    with torch.no_grad():
        wanted = [expected((model, tmp_path), tokens)[-1], model(inputs_embeds=table[None]).logits[0, -1]]
    for row, logits in enumerate(wanted):
        # For Falcon-H1, transformers scales only tokens that it embeds itself; PEFT embeds them, so not even the real
        # tokens are scaled.
        if row or name != "falcon_h1":
            error = float((recorder.logits[0][row] - logits).abs().max())
            assert error <= TOLERANCE * max(1.0, float(logits.abs().max())), row


def table_from(folder: Path, runner: ModelRunner) -> np.ndarray:
    table = runner.adapters.get(ref_of(runner, folder / "soft")).prompt_table
    assert table is not None
    return table.numpy()


def run(runner: ModelRunner, tokens: list[int], chunk: int, **fields: object) -> list[int]:
    driver = Driver(runner)
    new = [replace(driver.sequence(3, tokens), **fields)]  # type: ignore[arg-type]
    for start in range(0, len(tokens), chunk):
        driver.step(new, [(3, start, min(chunk, len(tokens) - start))])
        new = []
    for _ in range(NUM_NEW - 1):
        driver.step(generation=[3])
    return driver.output(3)


def test_a_table_gives_the_same_bits_as_the_adapter_in_whatever_chunks(
    model_folder: tuple[torch.nn.Module, Path], runner: ModelRunner
) -> None:
    tokens = VIRTUAL + prompt(30, seed=3)
    named = run(runner, tokens, 100, prompt=ref_of(runner, model_folder[1] / "soft"))
    table = table_from(model_folder[1], runner)
    for chunk in (100, 7, 3, 1):
        assert run(runner, tokens, chunk, prompt_table=table) == named
    assert run(runner, tokens, 100, prompt_table=-table) != named


def test_virtual_tokens_have_the_positions_of_their_ids(
    model_folder: tuple[torch.nn.Module, Path], runner: ModelRunner
) -> None:
    """A table that contains the embeddings of real tokens gives the same output as those tokens."""
    weights: Tensor = model_folder[0].get_input_embeddings().weight.detach()  # type: ignore[operator]
    tokens = prompt(24, seed=4)
    rows = [tokens[3], tokens[10], tokens[11]]
    mixed = [*tokens[:3], VOCAB, *tokens[4:10], VOCAB + 1, VOCAB + 2, *tokens[12:]]
    assert run(runner, mixed, 8, prompt_table=weights[rows].numpy()) == run(runner, tokens, 100)


@pytest.mark.parametrize(
    ("fields", "tokens", "message"),
    [
        ({"prompt_table": np.zeros((5, 63), np.float32)}, VIRTUAL, r"prompt_tuning.table: is \[5, 63\], expected \["),
        ({"prompt_table": np.zeros((4, 64), np.float32)}, VIRTUAL, r"not in 0\.\.334"),
        ({}, VIRTUAL, r"not in 0\.\.330"),
        ({"prompt_table": np.full((5, 64), np.nan, np.float32)}, VIRTUAL, "not finite"),
        ("lora", VIRTUAL, "'lora' is not a prompt adapter"),
    ],
)
def test_a_bad_table_fails_its_own_row(
    model_folder: tuple[torch.nn.Module, Path],
    runner: ModelRunner,
    fields: dict[str, object] | str,
    tokens: list[int],
    message: str,
) -> None:
    if isinstance(fields, str):
        fields = {"prompt": ref_of(runner, model_folder[1] / "lora")}
    driver, other = Driver(runner), prompt(6, seed=8)
    bad = replace(driver.sequence(0, tokens), **fields)  # type: ignore[arg-type]
    output = driver.step([bad, driver.sequence(1, other)], [(0, 0, len(tokens)), (1, 0, 6)])
    ((row, error),) = output.errors
    assert row == 0
    with pytest.raises(type(error), match=message):
        raise error
    assert driver.output(1) == Driver(runner).run_alone(other, 1)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("FLOAT32", torch.float32), ("FLOAT16", torch.float16), ("BFLOAT16", torch.bfloat16)]
)
def test_a_table_is_read_from_its_parts(dtype: str, kind: torch.dtype) -> None:
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(kind)
    data = table.view(torch.uint8).numpy().tobytes()
    whole = pb.Tensor(dtype=pb.Tensor.Dtype.Value(f"DTYPE_{dtype}"), shape=[6, 4])
    parts = [pb.Tensor(data=data[:10]), pb.Tensor(data=data[10:], is_last=True)]
    for part in parts:
        part.MergeFrom(whole)
    assert np.array_equal(table_of(parts), table.float().numpy())
    with pytest.raises(InvalidArgumentError, match=r"bytes; does not match the shape \[6, 4\]"):
        table_of([parts[1]])


def test_a_step_does_not_wait_for_a_lost_table() -> None:
    messages = AdapterMessages(no_adapters(), lambda: None)
    new = NewSequence(row=0, token_ids=ints([1]), num_prompt_tokens=1, prompt_table_key="k")
    part = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=[1, 2], data=b"\0" * 8, is_last=True)
    assert messages.complete(Step(new_sequences=(new,))) is None
    messages.keep(worker_pb2.PromptTablePart(key="k", tensor=part))
    step = messages.complete(Step(new_sequences=(new,)))
    assert step is not None
    assert step.new_sequences[0].prompt_table is not None
    assert messages.complete(Step(new_sequences=(new,))) is None  # the table applied only to the previous step
