"""Compiles a corpus of JSON schemas with several libraries, and checks random outputs with two validators: `python -m
benchmarks.json_schema.corpus FOLDER`.

The folder is the `data` of a clone of guidance-ai/jsonschemabench, or another one with a file for each schema.
Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal, getcontext
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import jsonschema
import jsonschema_rs

from benchmarks.json_schema.engines import ENGINES, walk

_COMPILE_S, _WALK_S = 2.0, 10.0  # processor time, as in the service; and for all walks of a schema
_MEMORY_BYTES = 4 << 30
_MAX_TOKENS = 400
_DIGITS = 1000  # of exact numbers
_LABELS = ("schemas", "compiled", "refused", "too slow or crashed", "outputs", "invalid", "dead ends", "unfinished")
_MODULES = {"XGrammar": "xgrammar", "outlines-core": "outlines_core"}
Result = dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="Take each Nth schema.")
    parser.add_argument("--walks", type=int, default=2, help="Outputs for each schema.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--show", action="store_true", help="Show what each library refuses or writes wrongly.")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.json"))[:: arguments.every]
    print("| | " + " | ".join(_LABELS) + " |\n|" + " --- |" * (len(_LABELS) + 1))
    for name in arguments.engines:
        if name in _MODULES and find_spec(_MODULES[name]) is None:
            print(f"{name} is not installed", file=sys.stderr)
            continue
        counts = Counter[str]()
        for file, result, reason in _results(name, files, arguments.walks):
            counts.update(result)
            if reason and arguments.show:
                print(f"{name}: {file.relative_to(arguments.folder)}: {reason}", file=sys.stderr, flush=True)
        print(f"| {name} | " + " | ".join(str(counts[label]) for label in _LABELS) + " |", flush=True)


def _results(name: str, files: list[Path], num_walks: int) -> Iterator[tuple[Path, Result, str]]:
    """Yield what an engine makes of each schema, and a reason if it is refused or wrong."""
    context = get_context("spawn")
    process = None
    for file in files:
        if process is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, theirs), daemon=True)
            process.start()
            theirs.close()
        try:
            ours.send((file.read_text(encoding="utf-8"), num_walks))
            result, reason = ours.recv()
        except (EOFError, OSError):
            process.join()
            process = None
            result, reason = {"too slow or crashed": 1}, "too slow or crashed"
        yield file, {"schemas": 1, **result}, reason
    if process is not None:
        process.kill()


def _serve(name: str, connection: Connection) -> None:
    getcontext().prec = _DIGITS
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the midst of a library's code
    engine = ENGINES[name]()
    with suppress(EOFError):
        while True:
            text, num_walks = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, _COMPILE_S)
            try:
                begin = engine.compile(text)
            except ValueError as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send(({"refused": 1}, str(error).strip().partition("\n")[0][:200]))
                continue
            signal.setitimer(signal.ITIMER_PROF, 0)
            counts, reason = Counter(compiled=1), ""
            signal.signal(signal.SIGPROF, _raise)
            signal.setitimer(signal.ITIMER_PROF, _WALK_S)
            try:
                for number in range(num_walks):
                    try:
                        output = walk(engine, begin, random.Random(number), _MAX_TOKENS)
                    except ValueError as error:
                        counts["dead ends"] += 1
                        reason = str(error)
                        continue
                    problem = "" if output is None else problem_of(text, output)
                    counts["unfinished" if output is None else "outputs"] += 1
                    counts["invalid"] += bool(problem)
                    reason = problem or reason
            except TimeoutError:
                counts["unfinished"] += 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
            connection.send((dict(counts), reason))


def _raise(number: int, frame: object) -> None:
    raise TimeoutError


def _finite(text: str) -> float:
    """Return the nearest number that a validator can hold."""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


def problem_of(text: str, output: str) -> str:
    """Return why an output does not match a schema, by either validator; empty if it does."""
    try:
        value = json.loads(output, parse_float=_finite)
        exact = json.loads(output, parse_float=lambda number: Decimal(str(_finite(number))))
    except ValueError as error:
        return f"{output[:200]}: {error}"
    schema = json.loads(text, parse_float=Decimal)  # with doubles, multiples of 0.1 would not be exact
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    found = next(validator.iter_errors(exact), None)
    if found is not None:
        return f"{output[:200]}: python: {found.message[:200]}"
    try:
        jsonschema_rs.validator_for(text).validate(value)
    except jsonschema_rs.ValidationError as error:
        return f"{output[:200]}: rust: {error.message[:200]}"
    return ""


if __name__ == "__main__":
    main()
