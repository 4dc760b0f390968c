"""Files in the working folder are never imported, regardless of their names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import midstream
from midstream.grammar.messages import Guide
from midstream.grammar.process import GrammarProcess
from midstream.model.folder import EMBEDDED_MODEL, open_model_folder
from midstream.python_process import bare_environment, python_command, python_environment
from router.pipeline.chat_template import ChatTemplate
from tests.integration.service import START_TIMEOUT_S

ROOT = Path(__file__).parents[2]
PACKAGES = ("detokenizer", "gpu_worker", "kernels", "midstream", "protos", "router", "scheduler")
NAMES = ("protos/__init__", "midstream/__init__", "scheduler", "router", "gpu_worker", "logging", "json", "numpy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a folder of modules, each of which writes to a file when it is imported."""
    folder = tmp_path / "project"
    for name in NAMES:
        file = (folder / name).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise SystemExit('imported')\n")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `midstream` command of an environment in which the project is installed as a user would install it,
    with its dependencies.
    """
    if not (ROOT / "setup.py").exists():  # the tests already run in an installation (tests/wheel.py)
        return Path(sys.executable).with_name("midstream")
    folder = tmp_path_factory.mktemp("installed")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    options = ["--python", str(folder / "venv/bin/python"), "-q", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *options, "install", "--no-deps", "--no-build-isolation"]
    # The new environment uses the modules of the current one, but not its editable installation of the project: .pth
    # files in a folder added to the path are not processed.
    packages = str(Path(pytest.__file__).parents[1])
    subprocess.run([*command, str(folder / "source")], check=True, env=os.environ | {"PYTHONPATH": packages})
    # Other projects also use names such as `router` and `kernels`.
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"midstream"}
    (site / "dependencies.pth").write_text(packages)
    if (ROOT / "kernels" / "_build").is_dir():  # the sources are the same, so they need not be compiled again
        shutil.copytree(ROOT / "kernels" / "_build", site / "midstream" / "kernels" / "_build")
    return folder / "venv" / "bin" / "midstream"


def serve_from(folder: Path, command: str) -> None:
    """Start every component in `folder`, send one prompt, and stop the components."""
    run_dir = ("--run-dir", str(folder.parent / "run"))

    def run(*words: str) -> str:
        done = subprocess.run(
            [command, *words, *run_dir],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        run("up", "--detach", "--port", "0", "--http-port", "0")
        assert run("generate", "Hi", "--max-tokens", "1", "--temperature", "0")
    finally:
        subprocess.run([command, "down", "--now", *run_dir], cwd=folder, check=False, capture_output=True)
    assert not (folder.parent / "imported").exists()


def test_parts_of_an_installation_import_nothing_from_there(folder: Path, installed: Path) -> None:
    serve_from(folder, str(installed))


def test_parts_of_a_checkout_import_nothing_from_there(folder: Path) -> None:
    serve_from(folder, str(Path(sys.executable).with_name("midstream")))


def test_helper_processes_import_nothing_from_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    template = ChatTemplate("{{ messages[0].content }}", {})
    process = GrammarProcess(open_model_folder(EMBEDDED_MODEL))
    try:
        assert template.render([{"role": "user", "content": "hello"}]) == "hello"
        assert process.check(Guide("regex", "a+")) == ""
    finally:
        template.close()
        process.kill()
    assert not (folder.parent / "imported").exists()


def test_a_command_alone_imports_nothing_from_there(folder: Path) -> None:
    """`python_command` must prevent such imports without `python_environment`, since what starts the process may
    change its environment variables.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = python_command("midstream.cli", "--version")
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert not (folder.parent / "imported").exists()


def test_a_process_for_untrusted_data_gets_paths_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PATH", "/bin"), ("PYTHONPATH", "/plugins"), ("MIDSTREAM_API_KEY", "secret")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert bare_environment(RAYON_NUM_THREADS="1") == {
        "PATH": "/bin",
        "PYTHONPATH": f"{Path(midstream.__file__).parents[1]}:/plugins",
        "PYTHONSAFEPATH": "1",
        "RAYON_NUM_THREADS": "1",
    }


def test_pythonpath_entries_independent_of_the_working_folder_stay() -> None:
    environment = python_environment({"PYTHONPATH": ":/plugins:.:lib", "HOME": "/home/user"})
    assert environment == {
        "PYTHONPATH": f"{Path(midstream.__file__).parents[1]}:/plugins",
        "PYTHONSAFEPATH": "1",
        "HOME": "/home/user",
    }
