"""The provenance of a release's files: an in-toto statement with SLSA's predicate, unsigned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.release.archives import digest_of


def write_provenance(
    path: Path, version: str, time_s: int, source: Mapping[str, str], inputs: Mapping[str, Path]
) -> None:
    """Write the provenance of all other files in the folder.

    Args:
        path: Where to write.
        version: The version that was built.
        time_s: SOURCE_DATE_EPOCH of the build.
        source: The commit (`gitCommit`) and, if known, the repository (`uri`).
        inputs: Further inputs by name, whose digests are recorded.
    """
    materials: list[dict[str, Any]] = [
        {"uri": source.get("uri", "git"), "digest": {"gitCommit": source["gitCommit"]}},
        *({"name": name, "digest": {"sha256": digest_of(file)}} for name, file in sorted(inputs.items())),
    ]
    subjects = [
        {"name": file.name, "digest": {"sha256": digest_of(file)}}
        for file in sorted(path.parent.iterdir())
        if file not in (path, path.parent / "SHA256SUMS")
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "make release",
                "externalParameters": {"version": version, "SOURCE_DATE_EPOCH": time_s},
                "resolvedDependencies": materials,
            },
            "runDetails": {"builder": {"id": "the machine of whoever publishes the release"}},
        },
    }
    path.write_text(json.dumps(statement, indent=1) + "\n", encoding="utf-8")
