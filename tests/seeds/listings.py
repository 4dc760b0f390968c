"""Run unmodified listings from the documentation of the APIs that this system implements."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from midstream import executor

# The documents use `from tensorrt_llm.executor import ...` and `tllm.Request` for names in midstream.executor.
PACKAGE = "tensorrt_llm"


@contextmanager
def tensorrt_llm() -> Iterator[None]:
    """Make `tensorrt_llm` importable for listings."""
    package = types.ModuleType(PACKAGE)
    package.__dict__.update(executor=executor, SamplingParams=executor.SamplingParams)
    sys.modules.update({PACKAGE: package, f"{PACKAGE}.executor": executor})
    try:
        yield
    finally:
        for name in (PACKAGE, f"{PACKAGE}.executor"):
            sys.modules.pop(name, None)


def run(listing: str, **names: Any) -> dict[str, Any]:
    """Run a listing with `names`, and return all its names; it may use top-level await."""
    code = compile(listing, "<listing>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    namespace: dict[str, Any] = {"tllm": executor, **names}
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        asyncio.run(_finish(result))
    return namespace


async def _finish(work: Any) -> None:
    await work
