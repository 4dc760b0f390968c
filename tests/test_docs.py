"""Files, headings, settings and commands that the documents name exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from midstream.cli import COMMANDS, PROGRAMS
from midstream.config import KNOWN_SETTINGS, reference

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Everything that may name a setting: whoever sets one of these variables must be able to start a service.
SOURCES = [
    path
    for folder in (
        "benchmarks", "deploy", "detokenizer", "docs", "examples", "gpu_worker", "kernels", "midstream", "router",
        "scheduler",
    )
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".md", ".py", ".sh", ".toml", ".yaml", ".yml"}
]  # fmt: skip


def text_of(page: Path) -> str:
    """Return the page without its fenced blocks, which contain no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_valid_targets(page: Path) -> None:
    for link in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_and_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert variables_in(text) - KNOWN_SETTINGS == set()
    commands = set(re.findall(r"^(?:[A-Z_]+=\S+ )*midstream (\w+)", text, re.MULTILINE))
    assert commands - COMMANDS.keys() - PROGRAMS.keys() == set()


def test_every_variable_that_code_or_a_document_names_is_accepted() -> None:
    """Each process refuses variables with the prefix that it does not know, so other variables must not have it."""
    files = [*PAGES, *SOURCES, ROOT / "Makefile", ROOT / "setup.py"]
    unknown = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in variables_in(file.read_text(encoding="utf-8")) - KNOWN_SETTINGS
    }
    assert unknown == set()


def variables_in(text: str) -> set[str]:
    """Return the settings whose variables are in the text; macros of the C++ compiler (-DNAME) are none."""
    return {name.lower() for name in re.findall(r"(?<!-D)\bMIDSTREAM_([A-Z0-9_]*[A-Z0-9])\b", text)}


def test_the_documented_path_of_a_request_exists() -> None:
    text = text_of(ROOT / "docs" / "architecture.md")
    section = text.partition("## The path of a request, by function\n")[2].partition("\n## ")[0]
    walk = [
        (step[1], name)
        for step in re.finditer(r"^\d+\. `([\w/]+\.py)` (.*?):", section, re.MULTILINE)
        for name in re.findall(r"`(\w+\.\w+)`", step[2])
    ]
    assert section.count("\n1. ") == 1
    assert len(re.findall(r"^\d+\. ", section, re.MULTILINE)) <= len(walk) <= 25
    assert len({file for file, _ in walk}) <= 15
    assert [found for found in walk if found[1] not in methods_of(ROOT / found[0])] == []


def methods_of(file: Path) -> set[str]:
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {f"{owner.name}.{item.name}" for owner in classes for item in owner.body if isinstance(item, functions)}


def test_the_page_of_settings_is_generated() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m midstream.config.reference"
    assert {name.upper() for name in KNOWN_SETTINGS} == set(
        re.findall(r"MIDSTREAM_([A-Z_0-9]+)[`=]", reference.page())
    ) - {""}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_program_has_a_module_that_runs(name: str) -> None:
    module, _ = PROGRAMS[name]
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.submodule_search_locations is None or importlib.util.find_spec(f"{module}.__main__")


def test_the_site_lists_pages_that_exist() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    listed = {page for section in site["nav"] for pages in section.values() for page in _pages(pages)}
    assert listed <= {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def _pages(entry: object) -> list[str]:
    if isinstance(entry, list):
        return [page for item in entry for page in _pages(item)]
    return [str(entry)]


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    calls = [call for command in commands for call in re.findall(r"\bmake ((?:[a-z][\w-]* ?)+)", command)]
    made = {target for call in calls for target in call.split()}
    assert made
    assert made <= targets
