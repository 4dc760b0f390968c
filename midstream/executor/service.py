"""Services that an executor starts: `midstream up` in a private run directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from midstream.cli.run_dir import RunDir
from midstream.errors import ExecutionError, NotFoundError
from midstream.executor.config import ExecutorConfig, ParallelConfig
from midstream.executor.engine_folder import check_vocabulary, read_config, with_tokenizer
from midstream.executor.post_processor_server import Call, FindCall, PostProcessorServer
from midstream.python_process import python_command, python_environment


class LocalService:
    """Router, scheduler, workers and detokenizers as processes on this machine.

    Attributes:
        addresses: Addresses of the routers.
        model_config: The model's config.json.
        find_function: Returns the arguments with which a post-processor that is a function of this process is called
            for a request; set by the executor.
    """

    find_function: FindCall | None = None

    def __init__(
        self,
        model: str,
        config: ExecutorConfig,
        *,
        tokenizer_dir: str | None = None,
        num_workers: int = 1,
        num_detokenizers: int = 1,
    ) -> None:
        """Start the service, and wait until it has loaded the model and is ready.

        Args:
            model: As for `midstream up --model`.
            config: Settings of the processes, in addition to the MIDSTREAM_* variables of this process.
            tokenizer_dir: Folder of the tokenizer, if it is not the model's.
            num_workers: Number of worker groups.
            num_detokenizers: Number of detokenizers.

        Raises:
            ConfigError: A folder is missing.
            ExecutionError: The service did not start.
            InvalidArgumentError: A setting is invalid.
            UnsupportedError: A setting requires a feature that is not implemented.
        """
        parallel = config.parallel_config or ParallelConfig()
        parts = {
            "routers": 1,
            "workers": num_workers,
            "detokenizers": num_detokenizers,
            "tensor-parallel": parallel.num_tensor_ranks,
            "pipeline-parallel": parallel.pipeline_parallel_size,
        }
        self._directory = Path(tempfile.mkdtemp(prefix="midstream-"))
        self._environment: dict[str, str] = {}
        self._functions: PostProcessorServer | None = None
        # A path of at most 107 characters, as Unix sockets require.
        self._socket = self._directory / "functions"
        # Allow adapters in any folder: only this process connects to the service, and it can read the same files
        # itself.
        own = {"MIDSTREAM_ADAPTER_ROOT": "/"}
        counts = [item for part, count in parts.items() for item in (f"--{part}", str(count))]
        try:
            environment = config.environment(str(self._socket))
            self._environment = python_environment({**own, **os.environ, **environment})
            processors = config.logits_post_processor_config
            functions = processors.functions() if processors else {}
            self._functions = PostProcessorServer(self._socket, functions, self._find)
            model = with_tokenizer(model, tokenizer_dir, self._directory / "model")
            self.model_config = read_config(model)
            guided = config.guided_decoding_config
            if guided is not None:
                check_vocabulary(guided, model)
            self._midstream("up", "--detach", "--model", model, "--port", "0", "--http-port", "0", *counts)
            state = RunDir(self._directory).read_state()
            if state is None:
                raise ExecutionError("the services did not report their addresses")
            self.addresses = [router.addresses["grpc"] for router in state.of_kind("router")]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the service and delete its state; running requests end with an error."""
        if self._functions is not None:
            self._functions.close()
        if self._environment:
            with contextlib.suppress(ExecutionError):
                self._midstream("down", "--now")
        shutil.rmtree(self._directory, ignore_errors=True)

    def _find(self, wire_id: str) -> Call:
        if self.find_function is None:
            raise NotFoundError("the executor has no request yet", field="logits_post_processor")
        return self.find_function(wire_id)

    def _midstream(self, command: str, *arguments: str) -> None:
        line = python_command("midstream.cli", command, "--run-dir", str(self._directory), *arguments)
        done = subprocess.run(
            line, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ExecutionError(f"midstream {command} failed: {(done.stderr or done.stdout).strip()}")
