"""llama.cpp on the GGUF file itself, measured by its own benchmark programs.

They generate their own tokens and do not support mixed lengths: `mixed` runs 64 prompts of the mean length in the
workload. The duration of a run does not depend on its tokens.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .peer import NUM_THREADS, Figures, Paths, Runner, Step, Workload, new_environment, pip_install

ENVIRONMENT = "llamacpp"
SOURCE = "llama_cpp_python-0.3.36"
PROGRAMS = ("llama-bench", "llama-batched-bench")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp with the published 4-bit file."""

    name: str = "llamacpp"
    label: str = "llama.cpp, Q4_1, its benchmark programs"
    workloads: Sequence[str] = ("single", "mixed", "prefill")

    def python(self, paths: Paths) -> Path:
        return paths.python(ENVIRONMENT)

    def steps(self, paths: Paths) -> Sequence[Step]:
        home = paths.home / ENVIRONMENT
        python, source = str(paths.python(ENVIRONMENT)), home / SOURCE
        ninja = f"-DCMAKE_MAKE_PROGRAM={home / 'bin' / 'ninja'}"
        options = (
            "-DCMAKE_BUILD_TYPE=Release",
            "-DGGML_NATIVE=ON",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
        )
        fetch = ("download", "--no-deps", "--no-binary", ":all:", "--dest", str(home))
        cmake = str(home / "bin" / "cmake")
        return (
            Step(
                "Fetch llama.cpp's source",
                (
                    new_environment(paths, ENVIRONMENT),
                    pip_install(paths, ENVIRONMENT, "cmake", "ninja"),
                    (python, "-m", "pip", *fetch, "llama-cpp-python==0.3.36"),
                    (python, "-m", "tarfile", "-e", str(home / f"{SOURCE}.tar.gz"), str(home)),
                ),
            ),
            Step(
                "Compile llama.cpp",
                (
                    (
                        cmake,
                        "-G",
                        "Ninja",
                        ninja,
                        "-S",
                        str(source / "vendor" / "llama.cpp"),
                        "-B",
                        str(home / "build"),
                        *options,
                    ),
                    (cmake, "--build", str(home / "build"), "--target", *PROGRAMS),
                ),
            ),
        )

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        programs = paths.home / ENVIRONMENT / "build" / "bin"

        def run(workload: Workload) -> Figures:
            if workload.name not in self.workloads:
                return Figures(workload.name, 0.0, 0.0)  # the benchmark programs warm up themselves
            prompt = round(sum(len(it.token_ids) for it in workload.requests) / len(workload.requests))
            if workload.counts_input:
                speed = _bench(programs, paths.gguf, "-p", str(prompt), "-n", "0")
                return Figures(workload.name, speed, workload.num_counted_tokens / speed)
            generated, width = workload.requests[0].max_tokens, len(workload.requests)
            if width == 1:
                speed = _bench(programs, paths.gguf, "-p", "0", "-n", "0", "-pg", f"{prompt},{generated}")
                duration = (prompt + generated) / speed  # llama.cpp counts both prompt and output tokens
            else:
                duration = _batched_bench(programs, paths.gguf, prompt, generated, width)
            return Figures(workload.name, width * generated / duration, duration)

        yield run


def _bench(programs: Path, model: Path, *arguments: str) -> float:
    """Return the tokens per second of llama-bench's only test, which includes its own warm-up."""
    command = [str(programs / "llama-bench"), "-m", str(model), "-t", str(NUM_THREADS), "-r", "1", "-o", "json"]
    output = subprocess.run([*command, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    (test,) = json.loads(output)
    return float(test["avg_ts"])


def _batched_bench(programs: Path, model: Path, prompt: int, generated: int, width: int) -> float:
    """Return the seconds that llama-batched-bench takes for `width` prompts with all of their output."""
    command = [
        *(
            str(programs / "llama-batched-bench"),
            "-m",
            str(model),
            "-t",
            str(NUM_THREADS),
            "-c",
            str(width * (prompt + generated)),
        ),
        *("-npp", str(prompt), "-ntg", str(generated), "-npl", str(width), "--output-format", "jsonl"),
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    return float(json.loads(line)["t"])
