"""Settings with which no request could run are rejected when the router starts."""

from __future__ import annotations

import dataclasses
import math

import pytest

from midstream.config import RouterConfig
from midstream.errors import ConfigError
from router.__main__ import check


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_beam_width", 0),
        ("max_concurrent_streams", -1),
        ("max_streams_per_client", 0),
        ("max_batch_lines", 0),
        ("num_tokenizer_threads", 0),
        ("unavailable_timeout_s", math.nan),
        ("trace_ratio", math.nan),
        ("trace_ratio", 1.5),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    check(RouterConfig())
    with pytest.raises(ConfigError) as raised:
        check(dataclasses.replace(RouterConfig(), **{name: value}))  # type: ignore[arg-type]
    assert raised.value.field == name
