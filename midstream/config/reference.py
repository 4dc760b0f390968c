"""Writes docs/settings.md from the settings of all services: `python -m midstream.config.reference`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from midstream.config import DetokenizerConfig, RouterConfig, SchedulerConfig, WorkerConfig
from midstream.config.service import GrpcServiceConfig, ServiceConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
_SERVICES: tuple[tuple[str, type[ServiceConfig]], ...] = (
    ("Router", RouterConfig),
    ("Scheduler", SchedulerConfig),
    ("Worker", WorkerConfig),
    ("Detokenizer", DetokenizerConfig),
)
_TEXT = """\
# Settings

Generated from `midstream/config` by `python -m midstream.config.reference`. Each setting is a flag of the service's own
command (`midstream scheduler --max-batch-size 64`) and a variable (`MIDSTREAM_MAX_BATCH_SIZE=64`), which `midstream
serve`, `midstream up`, images and the chart's `settings` also use; a flag overrides its variable. Unknown variables
that begin with `MIDSTREAM_` are errors. Booleans are `true` or `false`, and the flags `--NAME` or `--no-NAME`.

Clients and commands also use `MIDSTREAM_API_KEY` and `MIDSTREAM_TOKEN_FILE` ([keys](security.md#roles)) and
`MIDSTREAM_HOME`, the folder of prepared models.
"""


def page() -> str:
    """Return the page."""
    return _TEXT + "".join(_sections())


def _sections() -> Iterator[str]:
    """Yield the settings that all services share, then the others by service."""
    common = [item.name for item in dataclasses.fields(ServiceConfig)]
    grpc = [item.name for item in dataclasses.fields(GrpcServiceConfig) if item.name not in common]
    yield _section("All services", ServiceConfig, common)
    yield _section("Router, scheduler and detokenizer", GrpcServiceConfig, grpc)
    for title, config in _SERVICES:
        own = [item for item in dataclasses.fields(config) if not _is_shared(item, config)]
        yield _section(title, config, [item.name for item in own])


def _is_shared(item: dataclasses.Field[Any], config: type[ServiceConfig]) -> bool:
    """Return whether a setting has the same default and description in a service as in those that it shares it with."""
    base = GrpcServiceConfig if issubclass(config, GrpcServiceConfig) else ServiceConfig
    shared = {other.name: other for other in dataclasses.fields(base)}.get(item.name)
    return shared is not None and (shared.default, shared.metadata) == (item.default, item.metadata)


def _section(title: str, config: type[ServiceConfig], names: list[str]) -> str:
    fields = {item.name: item for item in dataclasses.fields(config)}
    types = get_type_hints(config)
    rows = "".join(_row(fields[name], types[name]) for name in names)
    return f"\n## {title}\n\n| variable | default | description |\n| --- | --- | --- |\n{rows}"


def _row(item: dataclasses.Field[Any], kind: type) -> str:
    choices = ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
    value = str(item.default).lower() if kind is bool else str(item.default)
    text = item.metadata["help"].replace("|", "\\|") + (f" One of {choices}." if choices else "")
    return f"| `MIDSTREAM_{item.name.upper()}` | {f'`{value}`' if value else ''} | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
