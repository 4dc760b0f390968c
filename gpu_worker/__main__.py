"""`python -m gpu_worker`."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import NoReturn

from gpu_worker.parallel.ranks import Ranks
from midstream.config import WorkerConfig, load_config
from midstream.errors import MidstreamError
from midstream.model.folder import open_model_folder
from midstream.telemetry import configure_logging

_CONFIG_EXIT_CODE = 2


def main() -> int:
    """Run a worker, or one rank of a worker that has several.

    Returns:
        The exit code: 0 if drained, 2 if the configuration is wrong, 3 if the scheduler rejected the worker, 4 if
        another rank is gone.
    """
    try:
        config = load_config(WorkerConfig, "gpu_worker")
        configure_logging(config.name or "gpu_worker", level=config.log_level, style=config.log_format)
        logging.captureWarnings(True)
        ranks = Ranks.from_environment(config, os.environ)
        folder = open_model_folder(config.model)
        logging.getLogger(__name__).info("importing torch")
        gc.disable()  # otherwise garbage collections of the new classes would take a tenth of the start-up time
        from gpu_worker.worker import Worker  # imported here, because torch takes seconds to import

        gc.enable()
        if not ranks.is_alone:
            from gpu_worker.parallel.launch import run_rank

            return run_rank(config, folder, ranks)
        worker = Worker(config, folder)
    except MidstreamError as error:
        print(f"gpu_worker: {error}", file=sys.stderr)
        return _CONFIG_EXIT_CODE
    return worker.run()


def _end(exit_code: int) -> NoReturn:
    """End the process without destroying the interpreter: torch's hundreds of thousands of objects take seconds, and
    everything that outlives the process has been closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _end(main())
