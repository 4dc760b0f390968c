"""`midstream bench --quick` compares a service with the limits of its machine."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from midstream.cli.bench.quick import table_of
from midstream.cli.bench.report import Summary
from midstream.cli.machine import Machine
from midstream.model.folder import open_model_folder


def test_one_stream_is_compared_with_reading_all_weights_for_each_token() -> None:
    model = open_model_folder("smollm2")
    num_bytes = sum(file.stat().st_size for file in model.weight_files)
    # The memory bandwidth allows a hundred reads of the weights per second; a token takes 20 ms.
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
