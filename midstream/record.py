"""Immutable values of which many are made per second, such as events, effects and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def record(cls: type[T], /) -> type[T]: ...


@overload
def record(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True)
def record(cls: type[T] | None = None, /, *, kw_only: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class a dataclass with slots whose fields only the type checker protects from changes.

    A frozen dataclass sets each field through a function call, which takes four times as long.
    """

    def decorate(cls: type[T]) -> type[T]:
        return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)(cls)

    return decorate(cls) if cls is not None else decorate
