"""Draws replayed from graphs, with a recorder that repeats what it recorded and with the kernels in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.sampling.distribution import IS_BROKEN, greedy_tokens
from gpu_worker.sampling.draws import RecordedDraws
from gpu_worker.sampling.sampler import Sampler
from kernels import dispatch
from kernels import triton as operations
from tests.gpu_worker.tiny_models import ints

CPU = torch.device("cpu")
COLD = [(6, 1e-30), (1, 1e-20), (6, 1.0)]
WARM = [SamplingParams(seed=3), SamplingParams(temperature=0.0), SamplingParams(temperature=2.5, seed=5)]
CUT = [SamplingParams(top_k=3), SamplingParams(top_p=0.5, min_p=0.1), SamplingParams(temperature=0.4, seed=2**64 - 1)]
# Lower temperatures are raised to 1e-6. At this temperature, the second likeliest token, whose logit is 2^-20 below
# that of the first, has a probability of 28%.
ONLY_TOP_P = [SamplingParams(top_p=0.9, seed=seed, temperature=temperature) for seed, temperature in COLD]


@pytest.mark.parametrize("params", [WARM, CUT, ONLY_TOP_P])
def test_recorded_draws_equal_the_samplers(params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    rows, places = Rows(4, 64, 16, 64, 50), ints([0, 1, 2])
    for row, sampling in enumerate([*params, SamplingParams(seed=9)]):
        tokens = np.arange(1, row + 3, dtype=np.int32)
        rows.add(NewSequence(row=row, token_ids=tokens, num_prompt_tokens=1, sampling=sampling, sequence_index=row + 1))
    logits, sampler = torch.randn(4, 50) * 3, Sampler(rows)
    logits[:, 20], logits[:, 40] = 12.0, 12.0 - 2**-20
    expected = sampler.sample(logits[:3], places).token_ids.tolist()
    replayed: list[int] = []

    def record(run: Callable[[], object]) -> Callable[[], None]:
        run()
        number = record_count[0]
        record_count[0] += 1

        def replay() -> None:
            replayed.append(number)
            run()

        return replay

    record_count = [0]
    fed: list[list[int]] = []
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    draws = RecordedDraws(CPU, [1, 4])
    assert draws.draw(sampler.draw_params(places)) is None
    best = greedy_tokens(logits)
    draws.capture(record, logits, best, lambda tokens: fed.append(tokens.tolist()))
    # A previous step with all rows, in another order, leaves its parameters in the buffers.
    assert draws.draw(sampler.draw_params(ints([3, 2, 1, 0]))) is not None
    drawn = draws.draw(sampler.draw_params(places))
    assert drawn is not None
    assert drawn.tolist() == expected
    # The padding row is greedy.
    assert fed[-1] == [*expected, int(logits[3].argmax())]
    # Graph 0 is the one for the larger size with top-k and top-p, and graph 1 the one without them.
    assert replayed[-1] == (1 if params is WARM else 0)
    logits[1, 7] = torch.nan
    best.copy_(greedy_tokens(logits))
    drawn = draws.draw(sampler.draw_params(places))
    assert drawn is not None
    assert drawn.tolist() == [expected[0], IS_BROKEN, expected[2]]
