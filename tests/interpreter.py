"""Makes Triton's interpreter skip work that has no effect on the results of kernels.

This uses private names of the pinned version of Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def speed_up() -> None:
    """Patch the interpreter so that it omits unused and repeated work."""
    _compute_no_unused_checks()
    _patch_the_language_once_per_kernel()


def _compute_no_unused_checks() -> None:
    """Omit the checks for overflow, which the interpreter computes but never reads unless it runs in debug mode."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_per_kernel() -> None:
    """Make the interpreter patch `triton.language` once per kernel launch instead of once per function call. A function
    that uses other modules of the language still has them patched.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    start: Callable[..., Any] = interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    def patch_lang(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        key = (any(value is tl for value in seen), any(value is tl.core for value in seen))
        if key in patched:
            return interpreter._LangPatchScope()
        patched.add(key)
        return patch(fn)

    def start_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return start(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = start_kernel
