"""Beam search in the core, with expected results computed by hand. Blocks have 4 tokens; the candidates are those of
tests/fakes/model.py.
"""

from __future__ import annotations

import copy
from array import array
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core import beams
from scheduler.core.beams import BeamSearch
from scheduler.core.effects import BeamsAdvanced, Fork, StepPlan
from scheduler.core.events import AbortRequested, Recovered, StopWordFound
from scheduler.core.request import FinishReason, Request
from scheduler.core.request_spec import RequestSpec
from scheduler.edge.beam_outputs import report_beams
from scheduler.wire.requests import spec_from_proto
from tests.fakes.model import candidates
from tests.scheduler.beam_reference import best_beams
from tests.scheduler.harness import LIMITS, VOCAB, Harness

PROMPT = [6, 7, 8, 9, 10]
STOPS = frozenset({999})


def plans(harness: Harness) -> list[StepPlan]:
    return [effect for effect in harness.effects if isinstance(effect, StepPlan)]


def ends(harness: Harness, request_id: str = "b") -> list[tuple[list[int], float | None]]:
    request = harness.core.lifecycle.requests[request_id]
    return [(s.output.tolist(), s.end.cumulative_log_prob if s.end else None) for s in request.sequences]


def test_beams_fork_share_full_blocks_and_copy_the_last() -> None:
    """Token t is followed by t+1 or t+2, with log probabilities -s and -2s, where s = (1 + t % 5) / 8."""
    harness = Harness()
    harness.add_group(num_blocks=16)
    harness.submit("b", PROMPT, 4, beam_width=2, num_sequences=2)
    # One lane computes the prompt; the other lane only has a row.
    assert harness.turn() == ["+b/0[0:5]"]
    assert harness.turn() == []
    # [11] has the score -1/8 and [12] has -2/8: the second beam forks. The beams share block 0; the block with the
    # fifth token is copied.
    assert harness.step() == ["b/0 b/1"]
    plan = plans(harness)[-1]
    assert plan.forks == [Fork(0, 1, (0, 2))]
    assert (plan.copy_source_blocks, plan.copy_target_blocks) == ([1], [2])
    assert (plan.beam_rows, plan.beam_token_ids) == ([0, 1], [11, 12])
    # Beams cannot be planned before the result arrives.
    assert harness.turn() == []
    # [11 12] has the score -3/8; [11 13] and [12 13] have -5/8. On a tie, the child of the better beam continues, in
    # the lane of the other beam.
    assert harness.step() == ["b/0 b/1"]
    plan = plans(harness)[-1]
    assert [(fork.from_row, fork.to_row) for fork in plan.forks] == [(0, 1)]
    assert plan.beam_token_ids == [12, 13]
    assert harness.group().blocks.num_held == 3
    # Only the first token is common to both beams, so only this token has been shown.
    assert harness.tokens == {("b", 0): [11]}
    # [11 12 13] has -6/8; [11 12 14] has -9/8, as does [11 13 14] with -5/8 - 4/8.
    assert harness.step() == ["b/0 b/1"]
    assert plans(harness)[-1].beam_token_ids == [13, 14]
    assert harness.tokens == {("b", 0): [11, 12]}
    # [11 12 13 14] has -6/8 - 4/8. [11 12 13 15] would have -14/8, the same as [11 12 14 15] with -9/8 - 5/8.
    assert harness.step() == []
    assert ends(harness) == [([11, 12, 13, 14], -10 / 8), ([11, 12, 13, 15], -14 / 8)]
    assert harness.ended == {"b": FinishReason.LENGTH}
    harness.check_is_empty()


def test_outputs_report_the_log_probs_that_the_search_summed_up_once_it_is_over() -> None:
    harness = Harness()
    harness.add_group(num_blocks=16)
    harness.submit("b", PROMPT, 4, beam_width=2, num_sequences=2)
    harness.submit("other", PROMPT, 4, beam_width=2, num_sequences=2)
    request, other = (harness.core.lifecycle.requests[name] for name in ("b", "other"))
    wanted = spec_from_proto(pb.GenerateRequest(output=pb.OutputConfig(log_probs=0)), LIMITS, 0)
    request.spec = replace(request.spec, wants_log_probs=wanted.wants_log_probs)
    report_beams(request, 0)
    assert request.sequences[0].outputs == []
    harness.run()
    report_beams(request, 0)
    report_beams(other, 0)
    rows = [worker_pb2.RowOutputs.FromString(s.outputs[0].data).log_probs.token_log_probs for s in request.sequences]
    assert rows == [[-1 / 8, -2 / 8, -3 / 8, -4 / 8], [-1 / 8, -2 / 8, -3 / 8, -8 / 8]]
    assert [len(sequence.outputs) for sequence in (*request.sequences, *other.sequences)] == [1, 1, 0, 0]


def test_beams_run_beside_sampling_which_is_planned_ahead() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("b", PROMPT, 3, beam_width=2)
    harness.submit("a", [1, 2, 3], 4)
    harness.submit("c", PROMPT, 3, beam_width=3)
    assert harness.turn() == ["+b/0[0:5] +a[0:3] +c/0[4:5]", "a"]
    assert harness.step() == ["b/0 b/1 a c/0 c/1 c/2"]
    assert harness.step() == ["a"]
    assert harness.step() == ["b/0 b/1 c/0 c/1 c/2"]
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH, "c": FinishReason.LENGTH}
    assert harness.tokens["a", 0] == [4, 5, 6, 7]
    harness.check_is_empty()


SEARCHES: list[dict[str, Any]] = [
    {"beam_width": width, "length_penalty": penalty, "early_stopping": stopping, "beam_diversity_rate": rate}
    for width in (2, 3, 8)
    for penalty in (0.0, 1.0, -0.5)
    for stopping in (0, 1, 2)
    for rate in (0.0, 0.3)
]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_a_search_equals_the_simple_implementation(search: dict[str, Any]) -> None:
    harness = Harness()
    harness.add_group(num_blocks=200)
    for last in range(9, 19):
        spec = search | {"num_sequences": min(search["beam_width"], 2), "stop_token_ids": STOPS}
        harness.submit(f"b{last}", [1, 2, last], 14, **spec)
    harness.run()
    for request_id in harness.ended:
        request = harness.core.lifecycle.requests[request_id]
        for sequence, (tokens, _) in zip(request.sequences, best_beams(request.spec, VOCAB), strict=True):
            assert sequence.output.tolist() == tokens
            assert sequence.end is not None
            assert sequence.end.reason is (FinishReason.STOP if tokens[-1] == 999 else FinishReason.LENGTH)
            assert sequence.end.stop_token_id == (999 if tokens[-1] == 999 else None)
    assert len(harness.ended) == 10
    harness.check_is_empty()


def test_a_pause_a_lost_worker_and_a_new_scheduler_change_nothing() -> None:
    spec = {"beam_width": 3, "num_sequences": 3, "stop_token_ids": STOPS}
    whole = Harness()
    whole.add_group()
    whole.submit("b", PROMPT, 12, **spec)
    whole.run()
    # A second worker takes over when the first worker has timed out.
    moved = Harness()
    moved.add_group("g")
    moved.submit("b", PROMPT, 12, is_detached=True, **spec)
    moved.turn()
    for _ in range(6):
        moved.step()
    moved.kill("g")
    moved.add_group("h")
    assert moved.turn() != []
    moved.run()
    assert ends(moved) == ends(whole)
    # Another scheduler takes over from the journal after any number of steps.
    request = whole.core.lifecycle.requests["b"]
    assert request.beams is not None
    steps = tuple(request.beams.search.steps)
    lengths = [effect.num_steps for effect in whole.effects if isinstance(effect, BeamsAdvanced)]
    assert lengths == list(range(1, len(steps) + 1))
    for count in range(len(steps) + 1):
        later = Harness()
        later.add_group()
        later.handle(Recovered(later.now_ns, request.spec, (array("I"),) * 3, beam_steps=steps[:count]))
        later.run()
        assert ends(later) == ends(whole)
        later.check_is_empty()


def test_too_few_blocks_pause_a_search_and_it_goes_on() -> None:
    alone = Harness()
    alone.add_group()
    small = Harness(capacity="max_utilization")
    small.add_group(num_blocks=18)
    for harness in (alone, small):
        for name, last in (("b", 20), ("c", 40), ("d", 60)):
            harness.submit(name, [1, 2, 3, last], 16, beam_width=3, num_sequences=2)
        harness.run()
        harness.check_is_empty()
    assert small.core.totals.num_preemptions > 0
    for name in "bcd":
        assert ends(small, name) == ends(alone, name)


def test_a_search_reserves_blocks_for_all_its_beams() -> None:
    """Prompt and output take 3 blocks of 4 tokens. Beams share the only full block of the prompt, so the first of three
    beams takes 3 blocks and the others take 2 each.
    """
    harness = Harness()
    harness.add_group(num_blocks=7)
    harness.submit("b", PROMPT, 8, beam_width=3)
    harness.submit("big", PROMPT, 8, beam_width=4)
    assert harness.refused == {}
    harness.run()
    assert harness.ended == {"b": FinishReason.LENGTH, "big": FinishReason.ERROR}
    failure = harness.core.lifecycle.requests["big"].failure
    assert failure is not None
    assert "36 tokens" in failure.message
    harness.check_is_empty()


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_time_gives_everything_back(num_steps: int) -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("b", PROMPT, 8, beam_width=4, num_sequences=2)
    harness.turn()
    for _ in range(num_steps):
        harness.step()
    harness.handle(AbortRequested(harness.now_ns, "b"))
    assert harness.ended == {"b": FinishReason.ABORT}
    # Only the tokens that all beams have in common have been shown.
    assert ends(harness) == [([11] if num_steps > 3 else [], None), ([], None)]
    harness.run()
    harness.check_is_empty()


def spec_of(**fields: Any) -> RequestSpec:
    return RequestSpec(request_id="b", prompt=array("I", [1]), **{"max_tokens": 9, "beam_width": 2} | fields)


@given(
    width=st.integers(2, 4),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.7, 2.0, -0.5]),
    stopping=st.integers(0, 2),
    rate=st.sampled_from([0.0, 0.5]),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=30)
def test_decided_tokens_begin_the_best_output_of_any_continuation(
    width: int, max_tokens: int, penalty: float, stopping: int, rate: float, rng: Random
) -> None:
    spec = spec_of(
        max_tokens=max_tokens,
        beam_width=width,
        length_penalty=penalty,
        early_stopping=stopping,
        beam_diversity_rate=rate,
        stop_token_ids=STOPS,
    )
    search = BeamSearch(spec)
    while not search.is_over:
        one_step(search, rng)
        shown = search.decided.tokens[: search.num_decided]
        for _ in range(3):
            other = copy.deepcopy(search)
            while not other.is_over:
                one_step(other, rng)
            best = other.ended[0].beam.tokens if other.ended else other.decided.tokens[: other.num_decided]
            assert best[: len(shown)] == shown


def one_step(search: BeamSearch, rng: Random) -> None:
    """Extend the beams by random candidates: there are few different tokens, many equal scores, and sometimes no
    candidates.
    """
    found = []
    for _ in search.running:
        tokens = rng.sample([1, 2, 3, 4, 5, 999], rng.choice([6, 6, 6, 1, 0]))
        found.append([(token, -rng.choice([0.0, 0.25, 0.25, 1.0, 3.0])) for token in tokens])
    search.apply(search.choose(found))


def searched(steps: list[list[list[tuple[int, float]]]], **fields: Any) -> BeamSearch:
    """Return a search after steps with these candidates of each beam."""
    search = BeamSearch(spec_of(stop_token_ids=STOPS, **fields))
    for step in steps:
        search.apply(search.choose(step))
    return search


# In each test, [1] has the cumulative log probability -1 and [2] has -2 after the first step.
FIRST = [[(1, -1.0), (2, -2.0)]]


def test_the_diversity_rate_counts_in_the_score_of_a_beam_that_a_token_ends() -> None:
    """[2] ends with -2 - 1 + 1.5, and [1] with -1 - 2; without the rate, both have -3 and [1] is first."""
    second = [[(999, -2.0), (3, -4.0)], [(999, -1.0), (4, -5.0)]]
    search = searched([FIRST, second], beam_diversity_rate=1.5, length_penalty=1.0)
    assert [(item.beam.tokens.tolist(), item.score) for item in search.ended] == [([2, 999], -0.75), ([1, 999], -1.5)]
    assert [item.beam.cumulative for item in search.ended] == [-3.0, -3.0]
    assert search.is_over  # as two beams have ended
    assert searched([FIRST, second], length_penalty=1.0).ended[0].beam.tokens.tolist() == [1, 999]


def test_the_last_step_with_a_diversity_rate_fills_up_the_running_beams() -> None:
    """The order of the candidates is 999 of [2] (-1.5), 4 of [2] (-2), 3 of [1] (-2.5) and 5 of [1] (-2.75).

    The first ends its beam with the score -1.5; 4 and 3 run on and end without the rate, with -4 and -2.5. Without a
    rate only the first two candidates count, here 3 and 5 of [1].
    """
    second = [[(3, -1.5), (5, -1.75)], [(999, -1.5), (4, -2.0)]]
    search = searched([FIRST, second], beam_diversity_rate=2.0, max_tokens=2)
    assert search.is_over
    assert [(item.beam.tokens.tolist(), item.score) for item in search.ended] == [([2, 999], -1.5), ([1, 3], -2.5)]
    assert [item.is_stopped for item in search.ended] == [True, False]
    plain = searched([FIRST, second], max_tokens=2)
    assert [item.beam.tokens.tolist() for item in plain.ended] == [[1, 3], [1, 5]]


# After the first step of a search of width 2, [999] has ended with -3; [1] has -1 and [2] has -4.
ONE_ENDS = [[(1, -1.0), (999, -3.0), (2, -4.0)]]


def test_beams_that_run_when_enough_have_ended_in_the_last_step_are_dropped() -> None:
    """With a rate [1, 3] is dropped, although its -1.5 is better than -1.75 and -3."""
    second = [[(3, -0.5), (999, -0.75)], [(4, -9.0)]]
    search = searched([ONE_ENDS, second], beam_diversity_rate=1.0, max_tokens=2)
    assert [(item.beam.tokens.tolist(), item.score) for item in search.ended] == [([1, 999], -1.75), ([999], -3.0)]
    plain = searched([ONE_ENDS, second], max_tokens=2)
    assert [item.beam.tokens.tolist() for item in plain.ended] == [[1, 3], [1, 999]]


@pytest.mark.parametrize(("last", "is_over"), [(-2.0, True), (-1.5, False)])
def test_the_best_candidate_with_the_rate_decides_whether_a_search_is_over(last: float, is_over: bool) -> None:
    """[1, 999] ends with -2. That is also the best candidate, so that the search goes on although the running beams
    have only -4 and -5.5. In the third step the best candidate has -4 + `last` + 3, to compare with -3.
    """
    second = [[(999, -1.0), (3, -3.0)], [(5, -1.5)]]
    search = searched([ONE_ENDS, second], beam_diversity_rate=3.0, early_stopping=0)
    assert [item.score for item in search.ended] == [-2.0, -3.0]
    # With the rate, [2, 5] precedes [1, 3].
    assert [(beam.tokens.tolist(), beam.cumulative) for beam in search.running] == [([2, 5], -5.5), ([1, 3], -4.0)]
    assert not search.is_over
    assert searched([ONE_ENDS, second], early_stopping=0).is_over
    search.apply(search.choose([[(8, -9.0)], [(7, last)]]))
    assert search.is_over is is_over


@given(
    width=st.integers(2, 4),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.7, 2.0, -0.5]),
    stopping=st.integers(0, 2),
    rate=st.sampled_from([0.0, 0.5]),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_a_restored_search_equals_the_original(
    width: int, max_tokens: int, penalty: float, stopping: int, rate: float, rng: Random
) -> None:
    spec = spec_of(
        max_tokens=max_tokens,
        beam_width=width,
        length_penalty=penalty,
        early_stopping=stopping,
        beam_diversity_rate=rate,
        stop_token_ids=STOPS,
    )
    search = BeamSearch(spec)
    assert vars(BeamSearch.restored(spec, [])) == vars(search)
    while not search.is_over:
        one_step(search, rng)
        assert vars(BeamSearch.restored(spec, search.steps)) == vars(search)


def test_each_token_is_decided_once_and_a_restored_search_decides_after_its_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_compared: list[int] = []
    num_common = beams._num_common

    def count(one: array[int], other: array[int]) -> int:
        common = num_common(one, other)
        num_compared.append(common + 1)
        return common

    monkeypatch.setattr(beams, "_num_common", count)
    request = Request(spec_of(max_tokens=600), 1)
    assert request.beams is not None
    search = request.beams.search
    for _ in range(500):
        search.apply(search.choose([[(5, -1.0), (6, -2.0)] for _ in search.running]))
    assert search.num_decided == 499
    assert sum(num_compared) == 499 + 500  # each step also compares one token at which the beams differ
    num_compared.clear()
    request.beams.restore(search.steps)
    assert vars(request.beams.search) == vars(search)
    assert len(num_compared) == 2
    assert sum(num_compared) <= 499 + 2


def test_a_best_beam_that_nothing_can_surpass_is_shown_before_the_search_is_over() -> None:
    """The first beam ends with the score -0.5. The scores of the others are lower and can only decrease, unless there
    is a length penalty, with which they can increase.
    """
    likely: list[Any] = [[(999, -0.5), (5, -1.0), (6, -1.25)]]
    for penalty, num_shown in ((0.0, 1), (1.0, 0)):
        search = BeamSearch(spec_of(length_penalty=penalty, early_stopping=0, stop_token_ids=STOPS))
        search.apply(search.choose(likely))
        assert not search.is_over
        assert search.decided.tokens[: search.num_decided].tolist() == [999][:num_shown]


def test_beams_end_where_a_stop_word_ends() -> None:
    """The first step gives [11] -1/8 and [12] -2/8; the second [11 12] -3/8, which completes the stop word, and then
    [11 13] and [12 13] with -5/8, and [11 14] with -7/8.
    """
    harness = Harness()
    harness.add_group()
    harness.submit("b", PROMPT, 4, beam_width=2, num_sequences=2, early_stopping=0, stop_words=("x", "1 12 "))
    harness.turn()
    for _ in range(2):
        harness.step()
    request = harness.core.lifecycle.requests["b"]
    assert request.beams is not None
    search = request.beams.search
    assert [(ended.beam.tokens.tolist(), ended.score, ended.stop_word) for ended in search.ended] == [
        ([11, 12], -3 / 8, "1 12 ")
    ]
    assert [beam.tokens.tolist() for beam in search.running] == [[11, 13], [12, 13]]
    # All other beams score less, so the best output is known, but its end is only reported with the others.
    assert harness.tokens == {("b", 0): [11, 12]}
    # The detokenizer finds the stop word too. Its report changes nothing.
    harness.handle(StopWordFound(harness.now_ns, "b", 0, 2, "1 12 "))
    assert harness.ended == {}
    harness.run()
    # [11 13 14] has -5/8 - 4/8, and [11 13 14 15] -9/8 - 5/8.
    assert ends(harness) == [([11, 12], -3 / 8), ([11, 13, 14, 15], -14 / 8)]
    found = [sequence.end for sequence in request.sequences]
    assert [(end.reason, end.stop_word) for end in found if end] == [
        (FinishReason.STOP, "1 12 "),
        (FinishReason.LENGTH, ""),
    ]
    harness.check_is_empty()


def test_a_step_considers_as_many_candidates_as_if_one_beam_had_all() -> None:
    """With stop words, a step considers twice the beam width of candidates, as in transformers, so that fewer beams
    may continue: here, three of the four best complete a stop word. Those beyond the beam width are dropped.
    """
    search = BeamSearch(spec_of(early_stopping=0, stop_words=("a", "b")))
    assert search.num_candidates == 4
    step = search.choose([[(5, -0.5), (6, -1.0), (7, -1.5), (8, -2.0)]], (), [{5: 1, 6: 2, 7: 1}])
    assert (step.token_ids, step.stop_words) == ((5, 6, 8), (1, 2, 0))
    search.apply(step)
    assert [(item.beam.tokens.tolist(), item.stop_word) for item in search.ended] == [([5], "a"), ([6], "b")]
    assert [beam.tokens.tolist() for beam in search.running] == [[8]]
    assert search.is_over
    restored = BeamSearch.restored(search.spec, search.steps)
    assert restored.ended == search.ended


def test_a_stop_token_ends_a_beam_before_a_stop_word() -> None:
    search = BeamSearch(spec_of(stop_token_ids=STOPS, stop_words=("a",)))
    search.apply(search.choose([[(999, -0.5), (6, -1.0)]], (), [{999: 1}]))
    assert [(item.stop_token_id, item.stop_word) for item in search.ended] == [(999, "")]


@pytest.mark.parametrize("num_steps", range(1, 4))
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_beams_end_at_the_same_stop_words_after_every_loss(num_steps: int, min_tokens: int) -> None:
    def started() -> Harness:
        harness = Harness()
        harness.add_group()
        spec = {"beam_width": 3, "num_sequences": 3, "early_stopping": 0, "min_tokens": min_tokens}
        harness.submit("b", PROMPT, 8, stop_words=("3 1", "12 14", "17"), **spec)
        harness.turn()
        return harness

    undisturbed = started()
    undisturbed.run()
    expected = [(s.output, s.end) for s in undisturbed.core.lifecycle.requests["b"].sequences]
    assert [end.stop_word for _, end in expected if end] != ["", "", ""]
    assert all(len(output) >= min_tokens for output, _ in expected)
    harness = started()
    for _ in range(num_steps):
        harness.step()
    request = harness.core.lifecycle.requests["b"]
    assert request.beams is not None
    steps, outputs = tuple(request.beams.search.steps), tuple(s.output for s in request.sequences)
    harness = Harness()
    harness.add_group()
    harness.prompts["b"] = PROMPT
    harness.handle(Recovered(0, request.spec, outputs, beam_steps=steps))
    harness.run()
    assert [(s.output, s.end) for s in harness.core.lifecycle.requests["b"].sequences] == expected


def test_a_failed_beam_ends_only_its_own_request() -> None:
    harness = Harness()
    harness.add_group(fail_token=77)
    harness.submit("b", [1, 77, 3], 5, beam_width=2)
    harness.submit("a", [1, 2, 3], 5)
    harness.run()
    assert harness.ended == {"b": FinishReason.ERROR, "a": FinishReason.LENGTH}
    harness.check_is_empty()


def test_fewer_beams_continue_if_few_tokens_are_possible() -> None:
    """Ties are broken by rank and then by token; a search ends when no beam can be extended."""
    search = BeamSearch(spec_of(beam_width=3, num_sequences=3))
    step = search.choose([[(5, -1.0), (4, -1.0)]])
    assert (step.parents, step.token_ids) == ((0, 0), (4, 5))
    assert search.apply(step) == [0, 0]
    step = search.choose([[(6, -1.0)], [(6, -1.0), (2, -1.0)]])
    assert list(zip(step.parents, step.token_ids, strict=True)) == [(0, 6), (1, 2), (1, 6)]
    search.apply(step)
    search.apply(search.choose([[], [], []]))
    assert search.is_over
    assert search.ended == []


def test_a_search_whose_beams_all_fail_ends_with_what_was_shown() -> None:
    request = Request(spec_of(num_sequences=2), 1)
    assert request.beams is not None
    rounds: list[Any] = [[[(5, -1.0)]], [[(6, -1.0), (7, -1.0)]], [[], []]]
    for found in rounds:
        for lane, row in zip(request.beams.running, found, strict=True):
            request.beams.take(lane, row)
        request.beams.advance()
    (shown, end), (nothing, _) = request.beams.ends(2)
    assert (shown.tolist(), end.num_tokens, nothing.tolist()) == ([5], 1, [])


@pytest.mark.parametrize(("penalty", "best"), [(3e38, [5, 999]), (-3e38, [999])])
def test_any_length_penalty_is_accepted(penalty: float, best: list[int]) -> None:
    search = BeamSearch(spec_of(max_tokens=3, length_penalty=penalty, early_stopping=0, stop_token_ids=STOPS))
    while not search.is_over:
        search.apply(search.choose([[(5, -1.0), (999, -1.5)] for _ in search.running]))
    assert search.ended[0].beam.tokens.tolist() == best


def test_the_fake_model_is_as_described() -> None:
    assert candidates(10, 2, STOPS, VOCAB) == [(11, -1 / 8), (12, -2 / 8)]
    assert candidates(14, 3, STOPS, VOCAB) == [(15, -5 / 8), (999, -10 / 8), (17, -15 / 8)]
