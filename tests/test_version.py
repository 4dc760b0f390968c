"""The version is written once, in midstream/__init__.py, and everything that names it agrees."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import midstream

ROOT = Path(__file__).parents[1]
GENERATE = runpy.run_path(str(ROOT / "deploy" / "helm" / "generate.py"))
IMAGE = re.compile(r"image: midstream-[a-z-]+:(\S+)")


def test_it_is_a_release_or_a_candidate() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", midstream.__version__)
    assert GENERATE["version"]() == midstream.__version__


def test_the_package_takes_it_from_the_module() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "midstream.__version__"}


@pytest.mark.parametrize("file", GENERATE["stamped_files"](), ids=lambda file: str(file.relative_to(ROOT)))
def test_chart_and_overlays_have_it(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == GENERATE["stamped"](file), "run python deploy/helm/generate.py"


def test_the_images_that_the_chart_deploys_have_it() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/midstream/Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == midstream.__version__
    files = sorted((ROOT / "deploy/helm/midstream/files").glob("*.yaml"))
    tags = {tag for file in files for tag in IMAGE.findall(file.read_text(encoding="utf-8"))}
    assert tags == {midstream.__version__, f"{midstream.__version__}-cuda"}


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert released[0] == midstream.__version__


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit that has the version and the script which names images."""
    (tmp_path / "midstream").mkdir()
    (tmp_path / "midstream" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    script = tmp_path / "deploy" / "containers" / "tag.sh"
    script.parent.mkdir(parents=True)
    script.write_bytes((ROOT / "deploy" / "containers" / "tag.sh").read_bytes())
    script.chmod(0o755)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Begin")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def tag_of(folder: Path) -> str:
    return subprocess.run([folder / "deploy/containers/tag.sh"], check=True, capture_output=True, text=True).stdout[:-1]


def test_images_of_a_release_have_its_version(checkout: Path) -> None:
    git(checkout, "tag", "-a", "v1.2.3", "-m", "1.2.3")
    assert tag_of(checkout) == "1.2.3"


def test_every_commit_and_every_change_has_its_own_tag(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    tags = [tag_of(checkout)]
    assert tags == [f"1.2.3-g{commit}"]
    for file, text in (("midstream/__init__.py", '__version__ = "1.2.3"\n\n'), ("new", "a"), ("new", "b")):
        (checkout / file).write_text(text)
        tags.append(tag_of(checkout))
    assert len(set(tags)) == 4
    assert all(re.fullmatch(rf"1\.2\.3-g{commit}-[0-9a-f]{{8}}", tag) for tag in tags[1:])


def test_sources_without_a_repository_are_those_of_the_release(checkout: Path) -> None:
    (checkout / ".git").rename(checkout / "elsewhere")
    assert tag_of(checkout) == "1.2.3"
