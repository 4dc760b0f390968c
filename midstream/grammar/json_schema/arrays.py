"""The rules of arrays."""

from __future__ import annotations

from typing import Any

from midstream.grammar.json_schema.choices import alternatives
from midstream.grammar.json_schema.conjunction import Conjunction, conjunction, least, list_of, size_of
from midstream.grammar.json_schema.demands import demands
from midstream.grammar.json_schema.errors import UnenforceableError
from midstream.grammar.json_schema.grammar import Many, Name, Sequence, Value
from midstream.grammar.json_schema.maker import Maker
from midstream.grammar.json_schema.spelling import spelled, spelled_parts

# Arrays of unique values are written with a rule for each set of values that were used.
_MAX_UNIQUE = 8


def array_rules(maker: Maker, whole: Conjunction) -> list[Sequence]:
    """Return the sequences of the arrays that match a conjunction without choices."""
    fixed, others = _members(maker, whole)
    lows = [size_of(schema, "minItems") or 0 for schema in whole.schemas]
    highs = [size_of(schema, "maxItems") for schema in whole.schemas]
    low, high = max(lows, default=0), None
    for limit in highs:
        high = least(high, limit)
    low = max(low, _least_contained(whole))
    if high is not None and low > high:
        return []
    opening, closing = maker.style.mark("["), maker.style.mark("]")
    if any(value is True for _, value in whole.having("uniqueItems")) and (high is None or high > 1):
        return [(opening, _unique(maker, fixed, others, low, high), closing)]
    names = [maker.value(item) for item in fixed[: len(fixed) if high is None else high]]
    return [(opening, _from(maker, names, maker.value(others), low, high), closing)]


def _members(maker: Maker, whole: Conjunction) -> tuple[list[list[object]], list[object]]:
    """Return the schemas of each of the first items, and those of all others."""
    prefixes: list[list[object]] = []
    rests: list[list[object]] = []
    for schema in whole.schemas:
        items = schema.get("items")
        prefix = list_of(schema, "prefixItems") if "prefixItems" in schema else items if isinstance(items, list) else []
        rest = schema.get("additionalItems", True) if isinstance(items, list) else schema.get("items", True)
        for part in (*prefix, rest):
            maker.document.enter(schema, part)
        prefixes.append(list(prefix))
        rests.append([rest])
    is_whole = any({"items", "additionalItems"} & schema.keys() for schema in whole.schemas)
    longest = max(map(len, prefixes), default=0)
    for schema, value in whole.having("unevaluatedItems"):
        maker.document.enter(schema, value)
        if whole.covers(schema):
            seen, is_seen = longest, is_whole
        else:
            own = next(place for place, other in enumerate(whole.schemas) if other is schema)
            seen, is_seen = len(prefixes[own]), bool({"items", "additionalItems"} & schema.keys())
        if not is_seen:
            rests.append([value])
            prefixes.append([True] * seen)
    count = max(map(len, prefixes), default=0)
    fixed = [
        [part for prefix, rest in zip(prefixes, rests, strict=True) for part in (prefix[index : index + 1] or rest)]
        for index in range(count)
    ]
    return fixed, [part for rest in rests for part in rest]


def _least_contained(whole: Conjunction) -> int:
    """Return the number of items that `contains` requires, if any item will do."""
    number = 0
    for schema, value in whole.having("contains"):
        low = size_of(schema, "minContains")
        low = 1 if low is None else low
        if low == 0 and "maxContains" not in schema:
            continue
        if value is not True and value != {}:
            raise UnenforceableError("contains cannot be enforced")
        if "maxContains" in schema:
            raise UnenforceableError("maxContains cannot be enforced; use maxItems")
        number = max(number, low)
    return number


def _from(maker: Maker, names: list[Value], other: Value, low: int, high: int | None) -> Name:
    """Return the rule of what is between the brackets."""
    between = maker.style.between
    count = len(names)
    rest: list[Sequence] = []
    # The items after the first ones.
    most = None if high is None else high - count
    if count:
        rest = [(Many((between, other), max(low - count, 0), most),)] if most is None or most > 0 else [()]
    else:
        if low == 0:
            rest.append(())
        if high is None or high > 0:
            rest.append((other, Many((between, other), max(low - 1, 0), None if high is None else high - 1)))
    following = maker.add(rest)
    for index in reversed(range(count)):
        item: Sequence = (between, names[index]) if index else (names[index],)
        options: list[Sequence] = [(*item, following)]
        if index >= low:
            options.append(())
        following = maker.add(options)
    return following


def _unique(maker: Maker, fixed: list[list[object]], others: list[object], low: int, high: int | None) -> Name:
    """Return the rule of what is between the brackets of an array whose values differ."""
    values = None if fixed else _values(maker, others)
    if values is None or len(values) > _MAX_UNIQUE:
        raise UnenforceableError(f"uniqueItems cannot be enforced, unless items has at most {_MAX_UNIQUE} values")
    known: dict[frozenset[int], Name] = {}

    def after(used: frozenset[int]) -> Name:
        if used in known:
            return known[used]
        name = known[used] = maker.add([])
        options = maker.rules[name.name]
        if len(used) >= low:
            options.append(())
        if high is None or len(used) < high:
            for index in set(range(len(values))) - used:
                item: Sequence = (maker.style.between, values[index]) if used else (values[index],)
                options.append((*item, after(used | {index})))
        return name

    return after(frozenset())


def _values(maker: Maker, schemas: list[object]) -> list[Name] | None:
    """Return the rules of all values that match; None if there may be any number."""
    whole = conjunction(maker.document, schemas)
    if whole is None:
        return []
    waiting, found = [whole], list[Any]()
    while waiting:
        options = alternatives(maker.document, part := waiting.pop())
        if options is not None:
            waiting += options
            continue
        needed = demands(maker.document, part)
        if needed.values is not None:
            found += needed.values
        elif needed.types <= {"null", "boolean"}:
            found += [None] * ("null" in needed.types) + [True, False] * ("boolean" in needed.types)
        else:
            return None
    distinct = {spelled(value, maker.style): value for value in found}
    return [maker.add([spelled_parts(value, maker.style)]) for value in distinct.values()]
