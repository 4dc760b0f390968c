"""Reads the fields of a JSON body, and tracks which were not read. As in OpenAI's API, null means unset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from midstream.errors import InvalidArgumentError
from router.protocols.long_json import parse_long_json

_MAX_UINT32 = (1 << 32) - 1


class Body:
    """A JSON object.

    Every getter raises InvalidArgumentError, with the field's path, if the value is invalid.
    """

    def __init__(self, fields: dict[str, object], path: str = "") -> None:
        self._fields = fields
        self._path = path
        self._read: set[str] = set()
        self._parts: dict[str, list[Body]] = {}

    @staticmethod
    def parse(data: bytes) -> Body:
        """Parse the object in `data`. Raises InvalidArgumentError if `data` is not JSON, or not an object."""
        try:
            value = parse_long_json(data)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise InvalidArgumentError("the body must be a JSON object")
        return Body(value)

    @property
    def fields(self) -> dict[str, object]:
        """The unmodified object."""
        return self._fields

    def get(self, name: str) -> object:
        """Return the value unchanged, and mark everything in it as read; None if it is unset."""
        self._read.add(name)
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def path(self, name: str) -> str:
        """Return the path of a field, for error messages."""
        return self._path + name

    def text(self, name: str) -> str | None:
        value = self.get(name)
        return value if value is None or isinstance(value, str) else self._refuse(name, "a string")

    def choice(self, name: str, options: tuple[str, ...]) -> str | None:
        """Return a field's value, which must be one of `options`."""
        value = self.text(name)
        return value if value is None or value in options else self._refuse(name, f"one of {', '.join(options)}")

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        return value if value is None or isinstance(value, bool) else self._refuse(name, "a boolean")

    def integer(self, name: str, low: int = 0, high: int = _MAX_UINT32) -> int | None:
        """Return an integer from low to high."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(name, f"an integer in {low}..{high}")
        return value

    def number(self, name: str) -> float | None:
        """Return a number; its range is validated by the checks of the native request."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 3e38:
            self._refuse(name, "a number")
        return float(value)

    def child(self, name: str) -> Body | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        if name not in self._parts:
            self._parts[name] = [Body(value, f"{self.path(name)}.")]
        return self._parts[name][0]

    def array(self, name: str) -> list[object]:
        """Return an array; empty if the field is unset."""
        value = self.get(name)
        if value is None:
            return []
        return value if isinstance(value, list) else self._refuse(name, "an array")

    def objects(self, name: str) -> list[Body]:
        values = self._fields.get(name)
        if values is None:
            return []
        if not isinstance(values, list):
            self._refuse(name, "an array")
        bodies = []
        for i, item in enumerate(values):
            if not isinstance(item, dict):
                self._refuse(f"{name}[{i}]", "an object")
            bodies.append(Body(item, f"{self.path(name)}[{i}]."))
        return self._parts.setdefault(name, bodies)

    def unread(self) -> Iterator[tuple[str, object]]:
        """Yield the paths and values of fields that were not read and are not null."""
        for name, value in self._fields.items():
            if name in self._read or value is None:
                continue
            if name in self._parts:
                for part in self._parts[name]:
                    yield from part.unread()
            else:
                yield self.path(name), value

    def texts(self, name: str) -> list[str]:
        """Return a string or an array of strings as a list."""
        value = self.get(name)
        if isinstance(value, str):
            return [value]
        texts = [item for item in self.array(name) if isinstance(item, str)]
        if len(texts) < len(self.array(name)):
            self._refuse(name, "strings")
        return texts

    def token_ids(self, name: str) -> list[int]:
        return token_ids(self.array(name), self.path(name))

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise InvalidArgumentError(f"must be {expected}", field=self.path(name))


def token_ids(values: list[object], field: str) -> list[int]:
    """Return `values`. Raises InvalidArgumentError unless all are integers in the valid range of token ids."""
    ids = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(ids) < len(values) or not all(0 <= value <= _MAX_UINT32 for value in ids):
        raise InvalidArgumentError("must be token ids", field=field)
    return ids
