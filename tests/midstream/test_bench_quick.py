"""`midstream bench` fits its workloads to the model, and compares a service with the limits of its machine."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from midstream.cli import main
from midstream.cli.bench import workloads
from midstream.cli.bench.measure import run_workload
from midstream.cli.bench.quick import table_of
from midstream.cli.bench.report import Summary, print_failures, summarize
from midstream.cli.machine import Machine
from midstream.errors import OverloadedError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from protos import loads_pb2
from tests.midstream.test_client import Router, serving


def test_one_stream_is_compared_with_reading_all_weights_for_each_token() -> None:
    model = open_model_folder("smollm2")
    num_bytes = sum(file.stat().st_size for file in model.weight_files)
    # The memory bandwidth allows the weights to be read a hundred times per second; a token takes 20 ms.
    machine = Machine("2.13", "", [], 4, "avx2", [], read_bytes_per_s=100.0 * num_bytes, flops_per_s=2e11)
    one = Summary("one", 45.0, 1.0, 1, 0, (30.0, 30.0), (20.0, 22.0), (1000.0, 1000.0))
    output = io.StringIO()
    many = replace(one, tokens_per_s=250.0)
    Console(file=output, width=120).print(table_of(machine, model, one, many))
    text = output.getvalue()
    assert "50.0 tokens/s" in text
    assert "100 tokens/s" in text
    assert "50% of reading" in text
    assert "5.0 times one stream" in text
    assert "200 GFLOP/s" in text


class SmallModel(Router):
    """A router whose model has 1,000 tokens; it rejects all requests."""

    async def GetModelInfo(self, request: Any, context: Any) -> loads_pb2.ModelInfo:  # noqa: N802
        return loads_pb2.ModelInfo(vocab_size=1000)

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        raise OverloadedError("the queue is full")
        yield


async def test_tokens_are_of_the_served_model_and_failures_have_a_reason() -> None:
    async with serving(kind=SmallModel) as (router, address):
        result = await run_workload([address], workloads.single(random.Random(0)))
    assert max(router.requests[0].token_ids.values) < 1000
    assert min(router.requests[0].token_ids.values) >= 300
    output = io.StringIO()
    print_failures([summarize(result)], Console(file=output))
    assert output.getvalue() == "Requests failed: the queue is full\n"


def test_workloads_of_a_large_vocabulary_are_the_same_for_each_model() -> None:
    workload = workloads.mixed(random.Random(0))
    assert workload.within(49_152) == workload.within(128_256) == workload


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--repeat", "0"], "--repeat"),
        (["--concurrency", "2", "-1"], "--concurrency"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--json", "/no/folder/a.json"], "--json"),
        (["--plot", "a.foo"], "--plot"),
    ],
)
def test_an_invalid_flag_is_rejected_before_anything_is_measured(
    flags: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--address", "127.0.0.1:1", *flags]) == 1
    assert f"midstream bench: {field}: " in capsys.readouterr().err
