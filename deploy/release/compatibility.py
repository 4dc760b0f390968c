"""Keeps docs/compatibility.md, whose tables come from results of tests in docs/compatibility.json.

pytest --record ...                                      adds the result and the versions of a test run
python -m deploy.release.compatibility kubernetes 1.34   adds a version whose schemas all manifests match
python -m deploy.release.compatibility                   writes the page
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
# What users may expect to work: versions that are maintained by their projects, and those that the package declares.
PYTHON = ("3.11", "3.12", "3.13", "3.14")
POSTGRES = ("14", "15", "16", "17", "18")
KUBERNETES = tuple(f"1.{minor}" for minor in range(30, 38))
# Numbers in the code that say which versions of Midstream understand each other.
FORMATS = (
    ("messages between scheduler and workers", "scheduler/core/config.py", "PROTOCOL_VERSION"),
    ("journal in a folder", "scheduler/journal/log.py", "VERSION"),
    ("journal and documents in PostgreSQL", "scheduler/journal/postgres.py", "SCHEMA_VERSION"),
)
_TEXT = """\
# Compatibility

Generated from results of tests by `python -m deploy.release.compatibility`. *Untested* means that nobody has run the
tests with that version, not that it fails.

{tables}
## Formats

| format | version |
| --- | --- |
{formats}

A scheduler rejects a worker whose messages have another version, and does not open a journal with a newer version than
its own. Both name the two versions.
"""


def record_tests(versions: Mapping[str, str | None], *, num_passed: int, num_failed: int) -> None:
    """Add a test run to the results; it replaces that of the same versions."""
    results = load()
    runs = [run for run in results["tests"] if run["versions"] != versions]
    run = {"versions": dict(versions), "passed": num_passed, "failed": num_failed}
    results["tests"] = sorted([*runs, run], key=lambda it: json.dumps(it, sort_keys=True))
    _save(results)


def record_kubernetes(versions: list[str]) -> None:
    """Add versions of Kubernetes against whose schemas all manifests were validated."""
    results = load()
    results["kubernetes"] = sorted({*results["kubernetes"], *versions}, key=_order)
    _save(results)


def load() -> Any:
    """Return the results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def page() -> str:
    """Return the page for the current results and code."""
    results = load()
    formats = "\n".join(f"| {name} | {_constant(*place)} |" for name, *place in FORMATS)
    return _TEXT.format(tables="\n".join(_tables(results)), formats=formats)


def _tables(results: Any) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    runs = results["tests"]
    yield _table("Python", f"{project['requires-python']} is required.", PYTHON, runs, "python")
    (torch,) = (it for it in project["optional-dependencies"]["worker"] if it.startswith("torch"))
    seen = sorted({str(run["versions"]["torch"]) for run in runs if run["versions"].get("torch")}, key=_order)
    yield _table("PyTorch", f"`{torch}` is required by workers; other services do not use it.", seen, runs, "torch")
    cuda = sorted({str(run["versions"]["cuda"]) for run in runs if run["versions"].get("cuda")}, key=_order)
    about = "For workers on GPUs ([GPUs](gpu.md)); PyTorch brings its libraries."
    yield _table("CUDA", about, cuda or ("any",), runs, "cuda")
    about = "For the journal of two schedulers ([PostgreSQL](operations.md#postgresql))."
    yield _table("PostgreSQL", about, POSTGRES, runs, "postgres")
    about = (
        "For Linux on x86_64. Kernels for aarch64 have only been tested in an emulator, and no release contains them."
    )
    yield _table("Processors", about, ("x86_64", "aarch64"), runs, "machine")
    valid = set(results["kubernetes"])
    rows = [
        f"| {it} | {'validated' if it in valid else 'untested'} |" for it in sorted({*KUBERNETES, *valid}, key=_order)
    ]
    yield (
        "## Kubernetes\n\n*Validated* means that every object of the chart and the overlays matches the schemas of "
        "that version.\nNo release has been tested in a cluster yet.\n\n| version | manifests |\n| --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def _table(title: str, about: str, versions: tuple[str, ...] | list[str], runs: Any, key: str) -> str:
    lines = [f"## {title}", "", about, "", "| version | tests |", "| --- | --- |"]
    for version in versions:
        found = [run for run in runs if _is_version(run["versions"].get(key), version)]
        tests = "; ".join(map(_described, found)) or "untested"
        lines.append(f"| {version} | {tests} |")
    return "\n".join([*lines, ""])


def _described(run: Any) -> str:
    names = ("python", "torch", "cuda", "postgres", "machine")
    where = ", ".join(f"{name} {run['versions'][name]}" for name in names if run["versions"].get(name))
    failed = f", {run['failed']} failed" if run["failed"] else ""
    return f"{run['passed']} passed{failed} ({run['versions']['tests']}; {where})"


def _is_version(found: str | None, version: str) -> bool:
    return found is not None and (found == version or found.startswith(f"{version}."))


def _order(version: str) -> list[int]:
    return [int(it) for it in re.findall(r"\d+", version)]


def _constant(file: str, name: str) -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{name} = (\d+)$", text, re.MULTILINE)
    return str(found)


def _save(results: Any) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["kubernetes"]:
        record_kubernetes(sys.argv[2:])
    else:
        PAGE.write_text(page(), encoding="utf-8")
