"""The real core with simulated workers, in virtual time."""

from __future__ import annotations

import random
import statistics
from array import array
from dataclasses import dataclass, replace

import pytest

from scheduler.core.core import SchedulerCore
from scheduler.core.cost_model import CostFit, CostModel
from scheduler.core.events import Event, Submitted
from scheduler.core.request_spec import RequestSpec
from scheduler.plugins import load_scheduler
from scheduler.replay.measures import Measures
from scheduler.replay.simulation import Script, Simulation
from scheduler.replay.simulator import Fleet, Load, events_of
from scheduler.replay.simulator import main as simulate


def run(fleet: Fleet, *loads: Load, policy: str = "guaranteed_no_evict", cost: CostModel | None = None) -> Measures:
    core = fleet.core(policy, "inflight_fused", max_queue_size=100_000)
    simulation = Simulation(core, events_of(fleet, *loads), cost=cost or CostModel())
    simulation.run()
    return simulation.measures


def test_one_request_takes_the_time_of_the_cost_model() -> None:
    load = Load(1.0, 1.0, seed=1)
    (arrival,) = load
    cost = CostModel(step_us=1000, context_token_us=10, generation_row_us=100, wire_us=0)
    measures = run(Fleet(max_num_tokens=4096), load, cost=cost)
    assert measures.first_token_ns == [1_000_000 + 10_000 * len(arrival.spec.prompt)]
    assert measures.tokens_ns == [1_100_000]
    assert measures.num_output_tokens == arrival.spec.max_tokens


@pytest.mark.parametrize("stop_token_ids", [frozenset[int](), frozenset({2, 3, 5})], ids=str)
def test_a_beam_search_is_simulated_without_faults(stop_token_ids: frozenset[int]) -> None:
    fleet, prompt = Fleet(), array("I", range(100, 140))
    core = fleet.core("guaranteed_no_evict", "inflight_fused")
    spec = RequestSpec(
        request_id="b",
        prompt=prompt,
        max_tokens=5,
        num_sequences=2,
        stop_token_ids=stop_token_ids,
        beam_width=3,
        is_detached=True,
    )
    (registered,) = events_of(fleet)
    scripts = {("b", 0): Script(array("I", [9, 8])), ("b", 1): Script(array("I", [9, 8, 7]))}
    Simulation(core, [registered, Submitted(registered.time_ns + 1, spec)], cost=CostModel(), scripts=scripts).run()
    assert core.totals.num_worker_faults == 0
    best, second = core.lifecycle.requests["b"].sequences
    filler, other = (4, 6) if stop_token_ids else (3, 4)
    assert best.output.tolist() == [9, 8, 7, filler, filler]
    assert second.output.tolist() == [9, 8, 7, filler, other]


def test_prefill_workers_keep_prompts_from_delaying_tokens() -> None:
    cost, load = CostModel(step_us=5_000, context_token_us=300), Load(10, 4, seed=2)
    fleet = Fleet(4, num_prefill_workers=2)
    apart = Simulation(fleet.core("guaranteed_no_evict", "inflight_fused"), events_of(fleet, load), cost=cost)
    apart.run()
    together, totals = run(Fleet(4), load, cost=cost), apart.core.totals
    assert totals.num_failed_handovers == 0
    assert 0.9 * totals.num_completed < totals.num_handovers <= totals.num_completed, "idle prefill groups keep a few"
    assert apart.measures.num_output_tokens == together.num_output_tokens
    slow_apart, slow_together = (sorted(each.tokens_ns)[-3] for each in (apart.measures, together))
    assert slow_apart < 0.8 * slow_together


def test_the_split_of_workers_is_varied(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--num-workers", "2", "3", "--prefill-workers", "0", "1", "2", "--request-rate", "5", "--duration", "1"]
    assert simulate(words) == 0
    shown = capsys.readouterr().out
    for column in ("2 workers", "1 + 1", "1 + 2", "2 + 1"):
        assert column in shown
    assert simulate(["--num-workers", "1", "--prefill-workers", "1"]) == 2


def test_the_seed_determines_the_output() -> None:
    first, again, other = (run(Fleet(2), Load(20, 2, seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_costs_are_found_again() -> None:
    rng, fit = random.Random(5), CostFit()
    true = CostModel(step_us=3000, context_token_us=12, generation_row_us=40)
    for _ in range(500):
        context, rows = rng.choice((0, 0, rng.randint(1, 500))), rng.randint(0, 64)
        fit.add(context, rows, true.step_ns(context, rows) / 1000 + rng.gauss(0, 50))
    found = fit.model()
    assert found.step_us == pytest.approx(3000, rel=0.02)
    assert found.context_token_us == pytest.approx(12, rel=0.02)
    assert found.generation_row_us == pytest.approx(40, rel=0.02)


def test_costs_are_never_negative() -> None:
    fit = CostFit()
    for rows in (1, 2, 3):
        fit.add(0, rows, 100 - 10 * rows)
    model = fit.model()
    assert (model.context_token_us, model.generation_row_us) == (0.0, 0.0)
    assert model.step_us == pytest.approx(80)
    assert CostFit().model() == CostModel()


@dataclass(frozen=True)
class Regime:
    """A kind of worker, and a request rate that uses about half of its capacity."""

    cost: CostModel
    fleet: Fleet
    request_rate: float
    duration_s: float
    has_long_prompts: bool = False


LARGE_MODEL = CostModel(step_us=20_000, context_token_us=20, generation_row_us=50)
MODEL_OF_8B = CostModel(step_us=8_000, context_token_us=25, generation_row_us=15)
REGIMES = {
    "large model": Regime(LARGE_MODEL, Fleet(num_blocks=8000, max_batch_size=128), 4, 8),
    "small model": Regime(CostModel(), Fleet(num_blocks=8000, max_batch_size=128), 4, 8),
    "many rows": Regime(MODEL_OF_8B, Fleet(num_blocks=8000, max_batch_size=256), 8, 6),
    "few rows": Regime(LARGE_MODEL, Fleet(num_blocks=4000, max_batch_size=8), 0.25, 60),
    "few blocks": Regime(LARGE_MODEL, Fleet(num_blocks=1000, max_batch_size=128), 1, 20),
    "long prompts": Regime(MODEL_OF_8B, Fleet(num_blocks=8000, max_batch_size=256), 0.75, 40, has_long_prompts=True),
}


# The policies differ only if blocks are scarce.
@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "guaranteed_no_evict") for name in REGIMES), ("few blocks", "max_utilization")]
)
def test_a_client_waits_at_most_twice_as_long_beside_one_with_20_times_its_load(name: str, policy: str) -> None:
    alone = median_first_token_ns(REGIMES[name], policy, 0)
    assert median_first_token_ns(REGIMES[name], policy, 20) <= 2 * alone


def test_anonymous_requests_run_in_order_of_arrival() -> None:
    regime = REGIMES["large model"]
    alone = median_first_token_ns(regime, "max_utilization", 0)
    assert median_first_token_ns(regime, "max_utilization", 20, has_clients=False) > 20 * alone


def median_first_token_ns(regime: Regime, policy: str, times: int, *, has_clients: bool = True) -> float:
    """Return the median time to first token of the client `small` while another client sends `times` as many
    requests.
    """
    loads = [Load(regime.request_rate, regime.duration_s, 1, "small")]
    if times:
        loads.append(Load(times * regime.request_rate, regime.duration_s, 1, "heavy"))
    config = regime.fleet.core(policy, "inflight_fused", max_queue_size=100_000).config
    config = replace(config, finished_ttl_ns=1 << 60, max_num_finished=1 << 30)
    core = SchedulerCore(config, load_scheduler("", policy, "inflight_fused"))
    events = [changed(event, regime, has_clients) for event in events_of(regime.fleet, *loads)]
    Simulation(core, events, cost=regime.cost).run()
    return statistics.median(
        request.times.first_token_ns - request.times.queued_ns
        for request_id, request in core.lifecycle.requests.items()
        if request_id.startswith("small")
    )


def changed(event: Event, regime: Regime, has_clients: bool) -> Event:
    """Return the event. If it submits a request, the prompt gets another length in a regime with long prompts, and the
    client's name is removed without `has_clients`.
    """
    if not isinstance(event, Submitted):
        return event
    spec = event.spec if has_clients else replace(event.spec, client_id="")
    if regime.has_long_prompts:
        draw = random.Random(spec.request_id)
        prompt = array("I", (draw.randrange(3, 50_000) for _ in range(draw.randint(500, 2500))))
        spec = replace(spec, prompt=prompt, max_tokens=draw.randint(8, 60))
    return replace(event, spec=spec)


def test_the_table_shows_how_planning_grows(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        simulate(["--num-workers", "1", "8", "--request-rate", "10", "--duration", "2", "--policy", "static_batch"])
        == 0
    )
    text = capsys.readouterr().out
    assert "1 worker " in text
    assert "8 workers" in text
    assert "planning" in text


@pytest.mark.parametrize("words", [["--num-workers", "5000"], ["--request-rate", "0"], ["--duration", "-1"]])
def test_invalid_flags_are_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(words) == 2
    assert words[0].removeprefix("--")[:4] in capsys.readouterr().err
