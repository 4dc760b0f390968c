"""The real core with simulated workers, in virtual time."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from scheduler.cost_model import CostFit, CostModel
from scheduler.events import Submitted
from scheduler.measures import Measures
from scheduler.simulation import Simulation
from scheduler.simulator import Fleet, Load, events_of
from scheduler.simulator import main as simulate


def run(fleet: Fleet, *loads: Load, policy: str = "guaranteed_no_evict", cost: CostModel | None = None) -> Measures:
    core = fleet.core(policy, "inflight_fused", max_queue_size=100_000)
    simulation = Simulation(core, events_of(fleet, *loads), cost=cost or CostModel())
    simulation.run()
    return simulation.measures


def test_one_request_takes_what_the_cost_model_says() -> None:
    load = Load(1.0, 1.0, seed=1)
    (arrival,) = load
    cost = CostModel(step_us=1000, context_token_us=10, generation_row_us=100, wire_us=0)
    measures = run(Fleet(max_num_tokens=4096), load, cost=cost)
    assert measures.first_token_ns == [1_000_000 + 10_000 * len(arrival.spec.prompt)]
    assert measures.tokens_ns == [1_100_000]
    assert measures.num_output_tokens == arrival.spec.max_tokens


def test_a_seed_decides() -> None:
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


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_client_beside_one_of_20_times_its_load_waits_at_most_twice_as_long(policy: str, seed: int) -> None:
    # Together they ask for about twice what the worker can do. A step of a large model: most of its time is fixed.
    small, heavy = Load(4.0, 8, seed, "small"), Load(80.0, 8, seed, "heavy")
    alone = median_first_token_ns(policy, [small])
    assert median_first_token_ns(policy, [small, heavy]) <= 2 * alone
    # Without names they are one client, in order of arrival.
    assert median_first_token_ns(policy, [small, heavy], has_clients=False) > 20 * alone


def median_first_token_ns(policy: str, loads: list[Load], *, has_clients: bool = True) -> float:
    """Of the client `small`."""
    fleet = Fleet(num_blocks=8000, max_batch_size=128)
    events = events_of(fleet, *loads)
    if not has_clients:
        events = [
            replace(event, spec=replace(event.spec, client_id="")) if isinstance(event, Submitted) else event
            for event in events
        ]
    core = fleet.core(policy, "inflight_fused")
    Simulation(core, events, cost=CostModel(step_us=20_000, context_token_us=20, generation_row_us=50)).run()
    return statistics.median(
        request.times.first_token_ns - request.times.queued_ns
        for request_id, request in core.lifecycle.requests.items()
        if request_id.startswith("small")
    )


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
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(words) == 2
    assert words[0].removeprefix("--")[:4] in capsys.readouterr().err
