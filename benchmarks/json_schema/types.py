"""Compiles the JSON schemas of 50 pydantic types and of 50 zod types: `python -m benchmarks.json_schema.types`.

Each type is shown as compiled, or as refused with the reason; the command fails if a reason names no keyword. Needs
Node and npm, which installs zod in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from shutil import copy
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pydantic
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from benchmarks.json_schema.engines import smollm2_tokenizer
from midstream.grammar.compile import GuideError, compile_guide
from midstream.grammar.messages import Guide

_ZOD = "zod@4.1.12"
_SOURCE = Path(__file__).with_name("zod_types.mjs")
# Words of reasons that name what is wrong.
_NAMED = ("cannot be enforced", "not supported", "no value can match", "use anyOf")


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: float = 0


@pydantic.dataclasses.dataclass
class Movie:
    title: str
    year: int = 0


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Nested(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    color: Color | None = None
    extra: dict[str, list[int]] = {}


_TYPES: tuple[Any, ...] = (
    str, int, float, bool, None, bytes, Decimal, date, datetime, time, timedelta, UUID, Path, IPv4Address, IPv6Address,
    pydantic.SecretStr, pydantic.AnyUrl, pydantic.HttpUrl, pydantic.StrictBool, pydantic.Json, pydantic.UUID4,
    pydantic.PositiveInt, pydantic.NegativeFloat, pydantic.FiniteFloat, pydantic.PastDate, pydantic.ByteSize, Color,
    Level, Point, Movie, Cat, Dog, Node, Closed, Open, Nested, list[int], set[Color], frozenset[str], tuple[int, str],
    tuple[int, ...], dict[str, float], dict[Color, int], int | None, int | str, Literal["a", 1, None],
    Annotated[str, Field(pattern="^[a-z]+$", max_length=5)], Annotated[float, Field(gt=0, le=0.5)],
    Annotated[int, Field(multiple_of=5, ge=10)], Annotated[Cat | Dog, Field(discriminator="kind")],
)  # fmt: skip


def main() -> None:
    tokenizer = smollm2_tokenizer()
    num_unnamed = 0
    for kind, name, schema in [*_pydantic_types(), *_zod_types()]:
        try:
            compile_guide(Guide("json_schema", json.dumps(schema)), tokenizer)
            result = "compiled"
        except GuideError as error:
            result = f"refused: {error}"
            num_unnamed += not any(word in str(error) for word in _NAMED)
        print(f"{kind}: {name}: {result}")
    if num_unnamed:
        raise SystemExit(f"{num_unnamed} reasons name no keyword")


def _pydantic_types() -> Iterator[tuple[str, str, object]]:
    for found in _TYPES:
        name = found.__name__ if isinstance(found, type) else str(found)
        yield "pydantic", name, TypeAdapter(found).json_schema()


def _zod_types() -> Iterator[tuple[str, str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", _ZOD], cwd=folder, check=True)
        copy(_SOURCE, folder)
        done = subprocess.run(["node", _SOURCE.name], cwd=folder, check=True, capture_output=True, text=True)
    for name, schema in json.loads(done.stdout):
        yield "zod", name, schema


if __name__ == "__main__":
    main()
