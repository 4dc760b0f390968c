"""Launching a step before the tokens of the previous step are known: the order of events and the results, on the GPU
code path.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.staging import PinnedBuffers, Readback
from gpu_worker.batch.step import EMPTY, Fork, IntArray, NewSequence, SamplingParams, Step, StepOutput
from gpu_worker.batch.steps_in_flight import StepsInFlight
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.features import Feature
from gpu_worker.lora.adapter import Adapter, LoraPair, module_shapes
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.models.decoder import ForwardInputs, Probe
from gpu_worker.sampling.distribution import MIN_TEMPERATURE, invert, threshold, weights
from gpu_worker.sampling.guided import Constraints
from gpu_worker.sampling.sampler import Chosen
from gpu_worker.sampling.uniforms import uniforms
from kernels import dispatch
from midstream.config import WorkerConfig
from midstream.grammar.messages import Guide
from midstream.model.folder import open_model_folder
from tests.gpu_worker.lazy_stream import LateReader
from tests.gpu_worker.tiny_models import ints

NUM_ROWS, BLOCKS_EACH = 5, 4
CPU = torch.device("cpu")
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, top_k=20),
    SamplingParams(temperature=0.0, log_probs=2),
    SamplingParams(seed=6, presence_penalty=0.5, no_repeat_ngram_size=2, log_probs=0),
]


def make(folder: Path, *, runs_ahead: bool, **settings: Any) -> ModelRunner:
    config = WorkerConfig(device="cpu", max_kv_tokens=512, max_batch_size=8, num_threads=1, kernels="torch", **settings)
    return ModelRunner(config, open_model_folder(str(folder)), runs_ahead=runs_ahead)


@pytest.fixture(scope="module")
def runners(tiny_folder: Path) -> tuple[ModelRunner, ModelRunner]:
    """Return a runner that finishes each step before the next, and a runner that runs ahead with recorded steps."""
    return make(tiny_folder, runs_ahead=False), make(tiny_folder, runs_ahead=True)


def sequence(row: int, tokens: list[int], sampling: SamplingParams = SAMPLINGS[0]) -> NewSequence:
    blocks = np.arange(BLOCKS_EACH, dtype=np.int32) + row * BLOCKS_EACH
    return NewSequence(
        row=row, token_ids=ints(tokens), num_prompt_tokens=len(tokens), block_ids=blocks, sampling=sampling
    )


def run_ahead(runner: ModelRunner, steps: list[Step]) -> list[StepOutput]:
    """Launch each step before finishing the previous one."""
    runner.clear()
    waiting: deque[Launched] = deque()
    outputs = []
    for step in steps:
        waiting.append(runner.launch(step))
        if len(waiting) > 1:
            outputs.append(runner.finish(waiting.popleft()))
    return outputs + [runner.finish(launched) for launched in waiting]


def run_in_turn(runner: ModelRunner, steps: list[Step]) -> list[StepOutput]:
    runner.clear()
    return [runner.run_step(step) for step in steps]


def plan(choices: list[int], kinds: int) -> list[Step]:
    """Plan steps without knowledge of the tokens: sequences start, are prefilled in chunks, decode, are preempted, end
    and fork.
    """
    steps, lengths, computed = [], dict[int, int](), dict[int, int]()
    idle: set[int] = set()
    for number, choice in enumerate(choices):
        released, new, forks, contexts = [], [], [], []
        decoding = [row for row in lengths if computed[row] >= lengths[row] and row not in idle]
        full = [row for row in decoding if computed[row] >= BLOCKS_EACH * 16 - 2]
        if full or (choice == 1 and decoding):
            gone = (full or decoding)[0]
            released.append(gone)
            decoding.remove(gone)
            del lengths[gone], computed[gone]
        free = [row for row in range(NUM_ROWS) if row not in lengths]
        if choice == 2 and free and decoding:
            blocks = np.arange(BLOCKS_EACH, dtype=np.int32) + free[0] * BLOCKS_EACH
            forks.append(Fork(decoding[0], free[0], blocks))
            lengths[free[0]], computed[free[0]] = lengths[decoding[0]], computed[decoding[0]]
            decoding.append(free[0])
        elif choice in (0, 3) and free:
            lengths[free[0]], computed[free[0]] = 9 + number, 0
            tokens = [(7 * number + i) % 300 for i in range(9 + number)]
            new.append(sequence(free[0], tokens, SAMPLINGS[number % kinds]))
        for row, length in lengths.items():
            if computed[row] < length:
                count = min(6, length - computed[row])
                contexts.append((row, computed[row], count))
                computed[row] += count
        idle = {decoding[-1]} if choice == 4 and len(decoding) > 1 else set()
        decoding = sorted(set(decoding) - idle)
        for row in decoding:
            computed[row] += 1
        copies = [
            (block + fork.from_row * BLOCKS_EACH, block + fork.to_row * BLOCKS_EACH)
            for fork in forks
            for block in range(BLOCKS_EACH)
        ]
        rows, starts, counts = zip(*contexts, strict=True) if contexts else ((), (), ())
        steps.append(
            Step(
                released_rows=ints(released),
                new_sequences=tuple(new),
                forks=tuple(forks),
                copy_sources=ints([source for source, _ in copies]),
                copy_targets=ints([target for _, target in copies]),
                context_rows=ints(rows),
                context_starts=ints(starts),
                context_lengths=ints(counts),
                generation_rows=ints(decoding) if decoding else EMPTY,
            )
        )
    return steps


@settings(max_examples=12, derandomize=True)
@given(choices=st.lists(st.integers(0, 5), min_size=4, max_size=24), kinds=st.sampled_from([2, 4]))
def test_tokens_equal_those_of_sequential_steps(
    runners: tuple[ModelRunner, ModelRunner], choices: list[int], kinds: int
) -> None:
    steps = plan(choices, kinds)
    in_turn, ahead = run_in_turn(runners[0], steps), run_ahead(runners[1], steps)
    for one, other in zip(in_turn, ahead, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs == other.log_probs
        assert one.errors == other.errors


@pytest.mark.parametrize(("catches_up", "kinds"), [(False, 4), (True, 2)])
def test_a_device_that_copies_late_changes_nothing(
    runners: tuple[ModelRunner, ModelRunner],
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    catches_up: bool,
    kinds: int,
) -> None:
    steps = plan(np.random.default_rng(0).integers(0, 6, 40).tolist(), kinds)
    in_turn = run_in_turn(runners[0], steps)
    device = LateReader(monkeypatch, catches_up=catches_up)
    slow = make(tiny_folder, runs_ahead=True)
    for one, other in zip(in_turn, run_ahead(slow, steps), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs == other.log_probs
    slow.close()
    assert device.num_to_device >= 40
    assert device.num_to_host >= 40


class Journal:
    """Records when token ids reach the model, and when the host reads sampled tokens."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Any]] = []
        forward, start = runner.model.decoder.forward, Readback.start

        def note_forward(inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            self.events.append(("forward", inputs.token_ids.tolist()))
            return forward(inputs, probe)

        def note_start(readback: Readback, values: Tensor) -> Any:
            copy = start(readback, values)
            number = len([kind for kind, _ in self.events if kind == "forward"])
            wait = copy.wait

            def note_wait() -> Any:
                self.events.append(("read", number))
                return wait()

            monkeypatch.setattr(copy, "wait", note_wait)
            return copy

        monkeypatch.setattr(runner.model.decoder, "forward", note_forward)
        monkeypatch.setattr(Readback, "start", note_start)


def test_a_step_starts_before_the_last_ones_tokens_are_read(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners[1]
    journal = Journal(runner, monkeypatch)
    prompts = [sequence(0, [5, 6, 7]), sequence(1, [8, 9], SAMPLINGS[1])]
    first = Step(
        new_sequences=tuple(prompts),
        context_rows=ints([0, 1]),
        context_starts=ints([0, 0]),
        context_lengths=ints([3, 2]),
    )
    run_ahead(runner, [first, Step(generation_rows=ints([0, 1])), Step(repeat_generation=True)])
    assert journal.events == [
        ("forward", [5, 6, 7, 8, 9]),
        ("forward", [-1, -2]),  # the placeholders of the first and second token of the previous step
        ("read", 1),
        ("forward", [-1, -2]),
        ("read", 2),
        ("read", 3),
    ]


class MasksByLastToken:
    """A stand-in for the grammar process: a row's last token determines which third of all tokens is allowed next."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._asked = rows, list[int]()

    def ask(self, sampled: IntArray, others: list[int]) -> bool:
        self._asked = [row for row in sampled.tolist() if self._rows.features[row] & Feature.GUIDED]
        return bool(self._asked)

    def answer(self) -> Constraints:
        last = {row: int(self._rows.tokens[row, self._rows.lengths[row] - 1]) for row in self._asked}
        tokens = np.arange(331)
        allowed = {row: (tokens + token) % 3 == 0 for row, token in last.items()}
        return Constraints({row: np.packbits(mask, bitorder="little") for row, mask in allowed.items()})


FEATURES = {
    "repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.3),
    "bias": SamplingParams(temperature=0.0, embedding_bias=((3, 2.0),)),
    "least number of tokens": SamplingParams(temperature=0.0, min_tokens=4, end_ids=(2,)),
    "log probabilities": SamplingParams(temperature=0.0, log_probs=2),
    "banned words": SamplingParams(temperature=0.0, bad_words=((4,), (5, 6))),
    "n-grams": SamplingParams(temperature=0.0, no_repeat_ngram_size=1),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=(3, 5)),
    "decaying top-p": SamplingParams(seed=7, top_p=0.9, top_p_decay=0.5),
    "grammar": SamplingParams(temperature=0.0),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_row_with_any_of_these_features_leaves_its_neighbours_step_in_flight(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    new = sequence(1, [8, 9], FEATURES[name])
    if name == "grammar":
        new = replace(new, guide=Guide("json"))
        for runner in runners:
            monkeypatch.setattr(runner, "_guides", MasksByLastToken(runner._rows))
    first = Step(
        new_sequences=(sequence(0, [5, 6, 7]), new),
        context_rows=ints([0, 1]),
        context_starts=ints([0, 0]),
        context_lengths=ints([3, 2]),
    )
    steps = [first, Step(generation_rows=ints([0, 1])), *[Step(repeat_generation=True)] * 4]
    in_turn, runner = run_in_turn(runners[0], steps), runners[1]
    journal = Journal(runner, monkeypatch)
    runner.clear()
    launched = [runner.launch(step) for step in steps[:2]]
    # The forward pass of the second step started before the tokens of the first step were read; the tokens of the
    # second step have not been read yet.
    assert [kind for kind, _ in journal.events] == ["forward", "forward", "read"]
    assert launched[1].output is None
    launched += [runner.launch(step) for step in steps[2:]]
    for one, other in zip([runner.finish(each) for each in launched], in_turn, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs == other.log_probs
        assert one.errors == other.errors == ()


def sample_on_host(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    sequence_indices: Tensor,
    positions: Tensor,
    **limits: bool,
) -> Tensor:
    """Stand in for the sampling kernel, with the worker's own sampling functions."""
    found = weights(logits, temperature.clamp(min=MIN_TEMPERATURE))
    least = torch.maximum(min_p[:, None], threshold(found, top_k.numpy(), top_p.numpy()))
    numbers = uniforms(seeds.numpy().view(np.uint64), sequence_indices.numpy(), positions.numpy())
    drawn = invert(found * (found >= least), torch.from_numpy(numbers))
    return torch.where(temperature > 0, drawn, logits.argmax(dim=1)).int()


def test_plain_rows_draw_their_tokens_in_graphs(
    runners: tuple[ModelRunner, ModelRunner], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows and rows with a temperature, in decode and in mixed steps, are never sampled outside of graphs."""
    steps = plan(np.random.default_rng(1).integers(0, 6, 30).tolist(), 2)
    in_turn = run_in_turn(runners[0], steps)
    monkeypatch.setattr(kernels, "can_sample", lambda logits: True)
    monkeypatch.setattr(dispatch, "triton", SimpleNamespace(sample=sample_on_host), raising=False)
    runner = make(tiny_folder, runs_ahead=True)

    def choose(*_: object) -> Chosen:
        raise AssertionError("rows were sampled outside of graphs")

    monkeypatch.setattr(runner._sampler, "choose", choose)
    for one, other in zip(in_turn, run_ahead(runner, steps), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    runner.close()


def random_adapter(runner: ModelRunner, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    layer = {
        module: LoraPair(
            torch.randn(4, inputs, generator=generator), torch.randn(outputs, 4, generator=generator), 0.05
        )
        for module, (inputs, outputs) in module_shapes(runner.model.description).items()
    }
    return Adapter("", f"random {seed}", (layer,) * runner.model.description.num_layers)


def test_adapters_are_exchanged_between_steps_in_flight(runners: tuple[ModelRunner, ModelRunner]) -> None:
    def steps(runner: ModelRunner) -> list[Step]:
        """Return steps in which each sequence takes over the row and the adapter memory of the sequence decoded in the
        previous step.
        """
        made = []
        for number in range(5):
            tokens = [(7 * number + i) % 300 for i in range(5)]
            new = replace(sequence(0, tokens), lora=runner.adapters.add(random_adapter(runner, number)))
            made.append(
                Step(
                    released_rows=ints([0] if number else []),
                    new_sequences=(new,),
                    context_rows=ints([0]),
                    context_starts=ints([0]),
                    context_lengths=ints([5]),
                )
            )
            made += [Step(generation_rows=ints([0]))] * 2
        return made

    runner = runners[1]
    one = random_adapter(runner, 0).device_bytes(4)
    for each in runners:
        each.clear()
        each.adapters.device_bytes = one
    in_turn = run_in_turn(runners[0], steps(runners[0]))
    launched, outputs = deque[Launched](), []
    for step in steps(runner):
        launched.append(runner.launch(step))
        assert launched[-1].copy is not None, "the step waited for its tokens"
        if len(launched) > 1:
            outputs.append(runner.finish(launched.popleft()))
    outputs += [runner.finish(last) for last in launched]
    assert [output.token_ids.tolist() for output in outputs] == [output.token_ids.tolist() for output in in_turn]
    assert len({output.token_ids[0] for output in outputs}) > 2
    assert runner.adapters.num_device_bytes == one


def test_a_draft_model_proposes_the_same_with_and_without_graphs(tiny_folder: Path) -> None:
    drafted = SamplingParams(temperature=0.0, num_draft_tokens=3, max_ngram_size=0)
    rows = ints([0, 1])
    steps = [
        Step(
            new_sequences=(sequence(0, [5, 6, 7], drafted), sequence(1, [8, 9], drafted)),
            context_rows=rows,
            context_starts=ints([0, 0]),
            context_lengths=ints([3, 2]),
        ),
        *[Step(generation_rows=rows, draft_rows=rows, draft_limits=ints([3, 3]))] * 3,
    ]
    found = []
    for runs_ahead in (False, True):
        runner = make(tiny_folder, runs_ahead=runs_ahead, draft_model=str(tiny_folder))
        found.append([(out.token_ids.tolist(), out.num_tokens, out.num_drafts) for out in run_in_turn(runner, steps)])
        if runs_ahead:
            assert runner._draft is not None
            graphs = runner._draft.decoder
            assert isinstance(graphs, GraphDecoder)
            assert graphs.best(1) is not None  # the last forward pass was a replay
        runner.close()
    assert found[0] == found[1]
    # If the draft model is the model itself, all drafts are accepted.
    assert found[0][1][1:] == ((4, 4), (3, 3))


def test_a_fork_waits_for_the_tokens_that_it_copies(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(runners[1], monkeypatch)
    first = Step(
        new_sequences=(sequence(0, [5, 6]),),
        context_rows=ints([0]),
        context_starts=ints([0]),
        context_lengths=ints([2]),
    )
    fork = Step(
        forks=(Fork(0, 1, ints(range(4, 8))),),
        copy_sources=ints([0]),
        copy_targets=ints([4]),
        generation_rows=ints([0, 1]),
    )
    outputs = run_ahead(runners[1], [first, fork])
    token = int(outputs[0].token_ids[0])
    assert [kind for kind, _ in journal.events] == ["forward", "read", "forward", "read"]
    assert journal.events[2] == ("forward", [token, token])


def test_a_row_that_has_another_sequence_by_then_keeps_its_tokens(runners: tuple[ModelRunner, ModelRunner]) -> None:
    zero, two = ints([0]), ints([2])
    steps = [
        Step(new_sequences=(sequence(0, [5, 6]),), context_rows=zero, context_starts=zero, context_lengths=two),
        Step(
            released_rows=zero,
            new_sequences=(sequence(0, [7, 8, 9]),),
            context_rows=zero,
            context_starts=zero,
            context_lengths=two,
        ),
        Step(context_rows=zero, context_starts=two, context_lengths=ints([1])),
    ]
    run_ahead(runners[1], steps)
    assert runners[1]._rows.tokens[0, :3].tolist() == [7, 8, 9]


def test_broken_logits_fail_their_row_alone(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners[1]
    assert isinstance(runner.model.decoder, GraphDecoder)
    decoder = runner.model.decoder._decoder
    forward = decoder.forward

    def broken(inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
        logits = forward(inputs, probe).clone()
        logits[0, 3] = torch.nan
        return logits

    monkeypatch.setattr(decoder, "forward", broken)
    both = Step(
        new_sequences=(sequence(0, [5]), sequence(1, [6])),
        context_rows=ints([0, 1]),
        context_starts=ints([0, 0]),
        context_lengths=ints([1, 1]),
    )
    for output in run_ahead(runner, [both, Step(generation_rows=ints([0, 1]))]):
        assert [row for row, _ in output.errors] == [0]
        assert output.token_ids[0] == 0
        assert output.token_ids[1] > 0


def test_arrays_are_transferred_in_one_copy() -> None:
    buffers = PinnedBuffers(CPU, 16)
    arrays = [np.array([2**40, -1]), np.array([0.5, 2.0], dtype=np.float32), np.array([[1, 2], [3, 4]], dtype=np.int32)]
    sent = buffers.send_arrays(arrays)
    buffers.send_arrays([np.zeros(16, dtype=np.int32)])
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.numpy().dtype == array.dtype


@dataclass
class FakeLaunched:
    number: int
    is_done: bool = False
    is_silent: bool = False


@dataclass
class FakeRunner:
    """A stand-in for the runner that records when steps are launched and finished."""

    events: list[str] = field(default_factory=list)
    launched: list[FakeLaunched] = field(default_factory=list)
    is_silent: bool = False

    def launch(self, step: Step) -> FakeLaunched:
        self.events.append(f"launch {step.step_id}")
        self.launched.append(FakeLaunched(step.step_id, is_silent=self.is_silent))
        return self.launched[-1]

    def finish(self, launched: FakeLaunched) -> StepOutput:
        self.events.append(f"finish {launched.number}")
        return StepOutput(EMPTY, (), (), 0.0)


def test_the_loop_launches_available_steps_before_it_waits_for_a_result() -> None:
    inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    runner = FakeRunner()
    steps = StepsInFlight[int, FakeLaunched](runner, inbox)
    for number in (1, 2, 3):
        inbox.put(number)
    for _ in range(2):
        step_id = steps.next()
        assert step_id is not None
        steps.launch(Step(step_id=step_id), 0.0)
    assert steps.next() is None  # at most two steps are in flight
    assert steps.finish()[0].step_id == 1
    assert steps.next() == 3
    steps.launch(Step(step_id=3), 0.5)
    runner.launched[1].is_done = True
    inbox.put(4)
    assert steps.next() is None  # a result that is available is sent first
    steps.finish()
    assert steps.next() == 4
    assert runner.events == ["launch 1", "launch 2", "finish 1", "launch 3", "finish 2"]
    steps.clear()
    inbox.put(5)
    assert steps.next() == 5


def test_the_loop_waits_for_a_pipelines_oldest_step_if_none_arrives() -> None:
    inbox: queue.SimpleQueue[int] = queue.SimpleQueue()
    steps = StepsInFlight[int, FakeLaunched](FakeRunner(is_silent=True), inbox, 3)
    for number in (1, 2, 3, 4):
        inbox.put(number)
    for expected in (1, 2, 3):
        assert steps.next() == expected
        steps.launch(Step(step_id=expected), 0.0)
    assert steps.next() is None  # at most three steps are in flight
    assert steps.oldest.step_id == 1
    steps.finish()
    assert steps.next() == 4
    assert steps.next() is None
