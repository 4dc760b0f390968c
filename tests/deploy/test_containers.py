"""The Containerfiles: command, ports and user."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.deploy.rendering import ROOT

CONTAINERS = ROOT / "deploy" / "containers"
EXPOSED = {
    "router": {50051, 8000},
    "scheduler": {50052, 50053, 50055, 8000},
    "detokenizer": {50054, 50055, 8000},
    "gpu_worker": {8000},
}


def containerfile(name: str) -> str:
    return (CONTAINERS / f"{name}.Containerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", EXPOSED)
def test_an_image_runs_without_privileges(part: str) -> None:
    last_stage = containerfile(part).rpartition("\nFROM ")[2]
    assert f'ENTRYPOINT ["python", "-P", "-m", "midstream.{part}"]' in last_stage
    assert "\nUSER 65532:65532\n" in last_stage
    (ports,) = re.findall(r"^EXPOSE (.*)$", last_stage, re.MULTILINE)
    assert set(map(int, ports.split())) == EXPOSED[part]
    # Compilers and pip must remain in the earlier build stages.
    assert ("apt-get" in last_stage) == (part == "gpu_worker")
    assert "$PIP" not in last_stage


@pytest.mark.parametrize("part", EXPOSED)
def test_an_image_contains_only_its_own_packages(part: str) -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", containerfile(part), re.MULTILINE))
    assert copied == {"protos", "midstream", part} | ({"kernels"} if part == "gpu_worker" else set())
    extras = {"gpu_worker": "worker", "scheduler": "scheduler,postgres"}.get(part, part)
    assert f"'.[{extras},tracing]'" in containerfile(part)


def test_a_worker_image_can_include_more_attention_kernels() -> None:
    build_stage = containerfile("gpu_worker").rpartition("\nFROM ")[0]
    assert "\nARG ATTENTION=\n" in build_stage
    assert '".[$ATTENTION]"' in build_stage
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["flash-attn"] == ["flash-attn>=2.7"]
    assert extras["flashinfer"] == ["flashinfer-python>=0.4"]


@pytest.mark.parametrize("name", [*EXPOSED, "model"])
def test_base_images_can_be_chosen_and_have_tags(name: str) -> None:
    defaults = dict(re.findall(r"^ARG (\w+_IMAGE)(?:=(\S+))?$", containerfile(name), re.MULTILINE))
    # The image of the model is one of the same build, so it has no default.
    assert defaults == {"BASE_IMAGE": "python:3.11-slim"} | ({} if name == "model" else {"MODEL_IMAGE": ""})
    bases = set(re.findall(r"^FROM (\S+)", containerfile(name), re.MULTILINE))
    assert bases == {f"${{{name}}}" for name in defaults} | ({"scratch"} if name == "model" else set())


@pytest.mark.parametrize("name", [*EXPOSED, "model"])
def test_equal_sources_make_equal_images(name: str) -> None:
    """Bytecode contains the time of its source unless it is told not to, and pip writes it unless it is told not to."""
    text = containerfile(name)
    assert text.count("$PIP install --no-compile") == text.count("$PIP install")
    assert "PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0" in text.rpartition("\nFROM ")[0]
    assert name == "model" or "compileall -qq -j 0 --invalidation-mode unchecked-hash" in text
