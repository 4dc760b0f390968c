"""Models named on the Hub, which huggingface_hub downloads from a stand-in for the Hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from midstream.model.hub import is_hub_name, repository_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TOKEN = "hf_secret"
FILES = {
    "config.json": json.dumps({
        "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "max_position_embeddings": 64,
    }).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "hf_quant_config.json": b"{ }",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "modules.json": b"[]",
    "README.md": b"# not needed",
    "original/consolidated.safetensors": b"the same weights again",
}  # fmt: skip
REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD_COMMIT, OLD_COMMIT: OLD_COMMIT}


class Hub(BaseHTTPRequestHandler):
    """Serves `/api/models/REPO/revision/REV`, `/api/models/REPO/tree/REV` and `/REPO/resolve/REV/FILE`."""

    downloaded: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models")
        owner, name, kind, revision, *rest = [*path.strip("/").split("/"), "", "", "", ""][:8]
        repository = f"{owner}/{name}"
        file = "/".join(part for part in rest if part)
        is_api = self.path.startswith("/api/")
        if repository not in {"acme/tiny", "acme/private", "acme/gated"}:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        if repository == "acme/private" and self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        if repository == "acme/gated":
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        commit = REVISIONS.get(revision or "main")
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        if is_api:
            siblings = [{"rfilename": file} for file in FILES]
            facts = {"_id": "1", "id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
            tree = [{"type": "file", "path": file, "size": len(data), "oid": "0"} for file, data in FILES.items()]
            return self._send(200, json.dumps(tree if kind == "tree" else facts).encode(), {}, with_body=with_body)
        if file not in FILES:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
        if with_body:
            self.downloaded.append(file)
        etag = hashlib.sha256(FILES[file]).hexdigest()
        return self._send(200, FILES[file], {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), "content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Log nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def prepare(hub: str, folder: Path, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `midstream prepare MODEL` in a new process, since huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    home = {"MIDSTREAM_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-m", "midstream.cli", "prepare", model],
        env=os.environ | settings | home | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_is_downloaded_once_and_served_under_its_name(hub: str, tmp_path: Path) -> None:
    Hub.downloaded.clear()
    first = prepare(hub, tmp_path, "acme/tiny")
    assert first.returncode == 0, first.stderr
    assert "acme/tiny is in" in first.stdout
    files = ["config.json", "hf_quant_config.json", "model.safetensors", "modules.json", "tokenizer.json"]
    nested = ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"]
    assert sorted(Hub.downloaded) == [*nested, *files]
    snapshot = tmp_path / "hf" / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    # Midstream must not write anything to the snapshot.
    assert sorted(path.name for path in snapshot.iterdir()) == ["1_Pooling", "additional_chat_templates", *files]
    Hub.downloaded.clear()
    offline = prepare(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert Hub.downloaded == []
    # If the snapshot's folder is given instead, the model has the same name.
    assert "acme/tiny is in" in prepare(hub, tmp_path, str(snapshot)).stdout


def test_a_revision_can_be_chosen(hub: str, tmp_path: Path) -> None:
    assert prepare(hub, tmp_path, "acme/tiny@v1").returncode == 0
    assert (tmp_path / "hf" / "hub" / "models--acme--tiny" / "snapshots" / OLD_COMMIT).is_dir()


def test_a_token_gives_access_to_a_private_repository(hub: str, tmp_path: Path) -> None:
    assert prepare(hub, tmp_path, "acme/private", HF_TOKEN=TOKEN).returncode == 0


TRY_ALL = """
import sys
from midstream.errors import ConfigError
from midstream.model.hub import download
for model in sys.argv[1:]:
    try:
        download(model)
    except ConfigError as error:
        print(error)
"""


def test_download_errors_name_a_remedy(hub: str, tmp_path: Path) -> None:
    cures = {
        "acme/private": "set HF_TOKEN",
        "acme/none": "neither a folder here nor on the Hub",
        "acme/gated": "license",
        "acme/tiny@v9": "no revision 'v9'",
        "acme/tiny/none.gguf": "no file",
    }
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    lines = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *cures], env=os.environ | settings, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(lines) == len(cures)
    for line, words in zip(lines, cures.values(), strict=True):
        assert words in line


def test_an_unreachable_hub_is_reported(tmp_path: Path) -> None:
    result = prepare("http://127.0.0.1:1", tmp_path, "acme/tiny")
    assert result.returncode == 1
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("model", "is_name"),
    [
        ("acme/tiny", True), ("acme/tiny@v1", True), ("acme/tiny/tiny.gguf", True), ("smollm2", False),
        ("/models/tiny", False), ("./acme/tiny", False), ("a/b/c", False), ("tiny.gguf", False),
    ],
)  # fmt: skip
def test_names_are_distinguished_from_paths(model: str, is_name: bool) -> None:
    assert is_hub_name(model) is is_name


def test_a_local_folder_takes_precedence_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert not is_hub_name("acme/tiny")
    assert repository_of(Path("/x/hub/models--acme--tiny/snapshots/abc")) == "acme/tiny"
    assert repository_of(Path("/x/tiny")) == ""
