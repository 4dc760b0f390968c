"""Lets Triton's interpreter spend less time on what has no effect on the results of kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def speed_up() -> None:
    """Replace the parts of the interpreter that would do the same work in every operation."""
    _compute_no_unused_checks()
    _patch_the_language_once_per_kernel()
    _look_types_up()


def _compute_no_unused_checks() -> None:
    """Omit the checks for overflow, which the interpreter computes but never reads unless it runs in debug mode."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once_per_kernel() -> None:
    """Patch the language when a kernel starts, and not for each function that the kernel calls, unless the function
    sees another module of the language.
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


def _look_types_up() -> None:
    """Keep NumPy's types of Triton's types, and the shapes of tensors."""
    numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def kept_numpy_type(dtype: Any) -> Any:
        name = dtype.name
        if (found := known.get(name)) is None:
            found = known[name] = numpy_type(dtype)
        return found

    interpreter._get_np_dtype = kept_numpy_type

    init_block: Callable[[Any, Any, Any], None] = tl.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int, str, Any, Any]] = {}

    def init_kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if (found := shapes.get(sizes)) is None:
            init_block(self, element_ty, shape)
            values = tl.core.tuple([tl.constexpr(size) for size in sizes])
            shapes[sizes] = (self.shape, self.numel, str(self.shape), values, tl.constexpr(self.numel))
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text, _, _ = found
            self.name = f"<{text}, {element_ty}>"

    scalar = tl.core.tuple([]), tl.constexpr(1)

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[tuple(kind.shape.values)][3:] if kind.is_block() else scalar

    tl.block_type.__init__ = init_kept_block
    tl.tensor.__init__ = init_tensor
