"""The child process for one peer: opens it, runs workloads as they arrive, and prints the figures of each as a line of
JSON.

python -m peers.child NAME HOME MODEL_FOLDER, with one workload per line of standard input; it exits at the end of
standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from .peer import Paths, parse_workload
from .processor_time import mark_processes, processor_seconds
from .registry import PEERS


def main() -> None:
    """Run the command."""
    name, home, model_folder = sys.argv[1:]
    # Close the peer even after a timeout.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    mark_processes()
    # Libraries may print to descriptor 1, so the figures are written to a duplicate of it.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        with PEERS[name].open(Paths(Path(home), Path(model_folder))) as run:
            for line in sys.stdin:
                before = processor_seconds()
                figures = run(parse_workload(line))
                figures = replace(figures, processor_s=processor_seconds() - before)
                print(json.dumps(asdict(figures)), file=output, flush=True)


if __name__ == "__main__":
    main()
