"""Walks randomly through the grammars of random schemas, and checks every output with two validators: `python -m
benchmarks.json_schema.walks`.

The tokens are single bytes, so that a walk visits as many states as possible. The command fails if a walk runs into a
dead end, or if an output does not match its schema.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from decimal import getcontext

import llguidance

from benchmarks.json_schema.corpus import problem_of
from benchmarks.json_schema.engines import Midstream, walk
from midstream.grammar.compile import GuideTokenizer

_TYPES = ("integer", "number", "string", "boolean", "null", "object", "array")
_NAMES = ("a", "b", "c")
_VALUES: tuple[object, ...] = (0, 1, 2, -1.5, "a", "b", "ab", None, True, [], [1], {"a": 1})
_PATTERNS = ("^a", "b$", "^[a-c]{1,3}$", '[^"]', "^\\S+$")
_MAX_DEPTH, _MAX_TOKENS = 3, 300
_DIGITS = 1000
Schema = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=350)
    parser.add_argument("--walks", type=int, default=30, help="Outputs for each schema.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts, problems = run(arguments.schemas, arguments.walks, arguments.seed)
    print(", ".join(f"{counts[name]} {name}" for name in ("schemas", "refused", "walks", "unfinished")))
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)


def run(num_schemas: int, num_walks: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Return the counts, and a line for each dead end and each output that does not match its schema."""
    getcontext().prec = _DIGITS
    engine = Midstream(GuideTokenizer(llguidance.LLTokenizer("byte"), {}))
    draw, counts, problems = random.Random(seed), Counter[str](), list[str]()
    while counts["schemas"] < num_schemas:
        schema = json.dumps(_schema(draw, 0))
        try:
            begin = engine.compile(schema)
        except ValueError:
            counts["refused"] += 1
            continue
        counts["schemas"] += 1
        for _ in range(num_walks):
            counts["walks"] += 1
            try:
                output = walk(engine, begin, draw, _MAX_TOKENS)
            except ValueError as error:
                problems.append(f"{schema}: {error}")
                continue
            counts["unfinished"] += output is None
            problem = "" if output is None else problem_of(schema, output)
            if problem:
                problems.append(f"{schema}: {problem}")
    return counts, problems


def _schema(draw: random.Random, depth: int) -> Schema:
    """Return a schema of one to three keywords, which may contain others."""
    schema: Schema = {}
    for _ in range(draw.randint(1, 3)):
        schema |= _keyword(draw, depth)
    return schema


def _keyword(draw: random.Random, depth: int) -> Schema:  # noqa: C901 (a table)
    kind = draw.randrange(12 if depth == _MAX_DEPTH else 24)
    size = draw.randrange(4)
    if kind <= 2:
        return {"type": draw.choice(_TYPES)}
    if kind == 3:
        return {draw.choice(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")): size - 1.5 * (kind == 9)}
    if kind == 4:
        return {draw.choice(("minLength", "maxLength")): size}
    if kind == 5:
        return {draw.choice(("minItems", "maxItems")): size}
    if kind == 6:
        return {draw.choice(("minProperties", "maxProperties")): size}
    if kind == 7:
        return {"enum": draw.sample(_VALUES, draw.randint(1, 5))}
    if kind == 8:
        return {"const": draw.choice(_VALUES)}
    if kind == 9:
        return {"pattern": draw.choice(_PATTERNS)}
    if kind == 10:
        return {"required": draw.sample(_NAMES, draw.randint(1, 2))}
    if kind == 11:
        return {"multipleOf": draw.choice((1, 2, 0.5, 0.1))}
    if kind <= 14:
        names = draw.sample(_NAMES, draw.randint(1, 3))
        return {"type": "object", "properties": {name: _schema(draw, depth + 1) for name in names}}
    if kind == 15:
        return {"additionalProperties": draw.choice((True, False, _schema(draw, depth + 1)))}
    if kind == 16:
        return {"items": _schema(draw, depth + 1)}
    if kind == 17:
        return {"prefixItems": [_schema(draw, depth + 1) for _ in range(draw.randint(1, 2))]}
    if kind == 18:
        return {"not": _schema(draw, _MAX_DEPTH)}
    if kind == 19:
        return {"patternProperties": {draw.choice(_PATTERNS): _schema(draw, depth + 1)}}
    if kind == 20:
        return {"dependentRequired": {draw.choice(_NAMES): [draw.choice(_NAMES)]}}
    if kind == 21:
        return {"if": _schema(draw, _MAX_DEPTH), "then": _schema(draw, depth + 1)}
    return {draw.choice(("anyOf", "oneOf", "allOf")): [_schema(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


if __name__ == "__main__":
    main()
