"""Mutate protobuf messages by means of their descriptors, so that the fields of all messages are covered, including
future ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INT_BITS: dict[int, tuple[bool, int]] = {
    FieldDescriptor.TYPE_UINT32: (False, 32),
    FieldDescriptor.TYPE_FIXED32: (False, 32),
    FieldDescriptor.TYPE_UINT64: (False, 64),
    FieldDescriptor.TYPE_FIXED64: (False, 64),
    FieldDescriptor.TYPE_INT32: (True, 32),
    FieldDescriptor.TYPE_SINT32: (True, 32),
    FieldDescriptor.TYPE_INT64: (True, 64),
    FieldDescriptor.TYPE_SINT64: (True, 64),
    FieldDescriptor.TYPE_ENUM: (True, 32),
}
_FLOATS = (0.0, -1.0, 1.0, 1e38, -1e38, math.nan, math.inf, -math.inf)
_TEXTS = ("", "x", "x" * 1000, "\n", "\u0000", "%s{}", "😀" * 300)


@dataclass(frozen=True)
class Mutator:
    """Random mutations.

    Attributes:
        numbers, texts: Values that are meaningful to the receiver, such as the epoch or name of another worker.
    """

    dice: random.Random
    numbers: Callable[[], Sequence[int]]
    texts: Callable[[], Sequence[str]]

    def mutate(self, message: Message) -> str:
        """Change one field, set or unset, of a message or of a nested message; return its path."""
        places = list(_fields(message, ""))
        path, owner, field = self.dice.choice(places)
        if field.is_repeated:
            self._mutate_repeated(owner, field)
        elif field.message_type is not None:
            if owner.HasField(field.name) and self.dice.random() < 0.3:
                owner.ClearField(field.name)
            else:
                part = getattr(owner, field.name)
                part.SetInParent()
                self.mutate(part) if field.message_type.fields else None
        elif self.dice.random() < 0.1:
            owner.ClearField(field.name)
        else:
            setattr(owner, field.name, self._value(field, getattr(owner, field.name)))
        return path

    def _mutate_repeated(self, owner: Message, field: FieldDescriptor) -> None:
        dice, values = self.dice, getattr(owner, field.name)
        kind = dice.choice(("one", "drop", "repeat", "add", "clear", "shuffle", "many"))
        if kind == "clear" or (kind == "drop" and len(values) <= 1):
            owner.ClearField(field.name)
        elif kind == "drop":
            del values[dice.randrange(len(values))]
        elif field.message_type is not None:
            self._mutate_messages(values, kind)
        elif kind == "one" and values:
            place = dice.randrange(len(values))
            values[place] = self._value(field, values[place])
        elif kind == "shuffle" and values:
            shuffled = list(values)
            dice.shuffle(shuffled)
            values[:] = shuffled
        elif kind == "many":
            values.extend([self._value(field, values[0] if values else None)] * dice.choice((10, 5_000)))
        else:
            values.append(
                values[dice.randrange(len(values))] if values and kind == "repeat" else self._value(field, None)
            )

    def _mutate_messages(self, values: Any, kind: str) -> None:
        if values and kind in ("one", "shuffle"):
            self.mutate(self.dice.choice(values))
        elif values and kind == "repeat":
            values.add().CopyFrom(self.dice.choice(values))
        else:
            for _ in range(500 if kind == "many" else 1):
                part = values.add()
                for _ in range(3):
                    self.mutate(part)

    def _value(self, field: FieldDescriptor, old: Any) -> Any:
        dice = self.dice
        if field.type in _INT_BITS:
            is_signed, bits = _INT_BITS[field.type]
            low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
            near = [] if old is None else [old - 1, old + 1]
            drawn = [0, 1, 2, low, high, high - 1, dice.randint(low, high), dice.randint(0, 50), *near, *self.numbers()]
            return min(max(dice.choice(drawn), low), high)
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return dice.choice(_FLOATS)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return dice.random() < 0.5
        if field.type == FieldDescriptor.TYPE_BYTES:
            return dice.randbytes(dice.choice((0, 1, 4, 1000)))
        return dice.choice((*_TEXTS, *self.texts()))


def _fields(message: Message, path: str) -> Iterator[tuple[str, Message, Any]]:
    for field in message.DESCRIPTOR.fields:
        here = f"{path}.{field.name}"
        yield here, message, field
        if field.message_type is None:
            continue
        if field.is_repeated:
            for part in list(getattr(message, field.name))[:4]:
                yield from _fields(part, here)
        elif message.HasField(field.name):
            yield from _fields(getattr(message, field.name), here)
