"""Run third-party load tools against the HTTP port: `python -m benchmarks.load_tools --url URL aiperf guidellm smg`.

Each tool is installed from PyPI in its own environment (.venv-tools/NAME) if needed and runs a small load; its report
is checked here. guidellm needs PyTorch, so its environment takes 2 GB. smg is a gateway in front of the service,
through which the load goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from midstream.model.folder import open_model_folder
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent
# Any build of PyTorch is sufficient; it is pinned so that pip chooses a CPU build if the index has one.
PACKAGES = {"aiperf": ["aiperf"], "guidellm": ["torch==2.13.0", "guidellm"], "smg": ["smg"]}
STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 16, 32, 16
TIMEOUT_S = 300


def main() -> int:
    """Run the tools; fail if a tool did not complete all its requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the router's HTTP port.")
    parser.add_argument(
        "--model", default="smollm2", help="Name of the served model; the tools count tokens with its tokenizer."
    )
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-tools", help="Folder for the environments.")
    parser.add_argument("tools", nargs="+", choices=sorted(PACKAGES))
    arguments = parser.parse_args()
    tokenizer = open_model_folder(arguments.model)
    failed = 0
    for name in arguments.tools:
        python = install(arguments.environments / name, PACKAGES[name])
        with tempfile.TemporaryDirectory() as folder:
            figures = TOOLS[name](python, Path(folder), arguments.url, tokenizer.name, str(tokenizer.path))
        print(f"{name}: {json.dumps(figures)}", flush=True)
        failed += figures["requests"] != REQUESTS
    return 1 if failed else 0


def install(environment: Path, packages: list[str]) -> Path:
    """Install a tool; return the bin folder of its environment."""
    commands = environment / "bin"
    if not (commands / packages[-1]).exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        for package in packages:
            constraints = [item for item in packages if "==" in item and item != package]
            subprocess.run([str(commands / "pip"), "install", "-q", *constraints, package], check=True)
    return commands


def aiperf(commands: Path, folder: Path, url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Run streamed chat completions; return the figures of the tool's JSON report."""
    command = [
        "aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tokenizer, "--concurrency", STREAMS, "--request-count", REQUESTS, "--isl", PROMPT_TOKENS,
        "--osl", OUTPUT_TOKENS, "--extra-inputs", "ignore_eos:true", "--artifact-dir", folder, "--ui", "none",
        "--no-gpu-telemetry",
    ]  # fmt: skip
    run(commands, folder, command)
    (path,) = folder.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    return {
        "requests": int(report["request_count"]["avg"]),
        "output_tokens_per_s": report["output_token_throughput"]["avg"],
        "first_token_ms": report["time_to_first_token"]["avg"],
    }


def guidellm(commands: Path, folder: Path, url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Run completions in concurrent streams; return the figures of the tool's JSON report."""
    path = folder / "report.json"
    command = [
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={model}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={path}", "--disable-console",
    ]  # fmt: skip
    run(commands, folder, command)
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    return {
        "requests": metrics["request_totals"]["successful"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "first_token_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
    }


def smg(commands: Path, folder: Path, url: str, model: str, tokenizer: str) -> dict[str, Any]:
    """Run the gateway in front of the service, and send requests through it."""
    (port,) = free_ports(1)
    command = ["smg", "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", url]
    command += ["--backend", "openai", "--model-path", tokenizer]
    process = subprocess.Popen([str(commands / "smg"), *map(str, command[1:])], cwd=folder, env=_environment(commands))
    try:
        gateway = f"http://127.0.0.1:{port}/v1/chat/completions"
        body = {"model": model, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        body["messages"] = [{"role": "user", "content": "Say something."}]
        body["stream_options"] = {"include_usage": True}
        give_up_at = time.monotonic() + TIMEOUT_S
        counts: list[int] = []
        while len(counts) < REQUESTS and time.monotonic() < give_up_at:
            with contextlib.suppress(OSError):
                counts.append(sum(_streamed_tokens(gateway, body)))
                continue
            time.sleep(1)
        return {"requests": len([count for count in counts if count == OUTPUT_TOKENS])}
    finally:
        process.terminate()
        process.wait()


def _streamed_tokens(url: str, body: Mapping[str, object]) -> Iterator[int]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0)


def run(commands: Path, folder: Path, command: Sequence[object]) -> None:
    """Run a tool; show its output only if it fails."""
    name, *rest = map(str, command)
    done = subprocess.run(
        [str(commands / name), *rest],
        check=False, cwd=folder, env=_environment(commands), timeout=TIMEOUT_S, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stdout[-3000:]} {done.stderr[-3000:]}")


def _environment(commands: Path) -> dict[str, str]:
    # Tools must not import the packages of this project.
    own = {"PATH": f"{commands}:{os.environ['PATH']}"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own


TOOLS: dict[str, Callable[[Path, Path, str, str, str], dict[str, Any]]] = {
    "aiperf": aiperf,
    "guidellm": guidellm,
    "smg": smg,
}

if __name__ == "__main__":
    sys.exit(main())
