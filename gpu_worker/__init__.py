"""The worker: executes the scheduler's steps on a model."""

import os

# PyTorch's own threads would spin for milliseconds behind each operation, on the processor that the kernels' threads
# need next. Read when PyTorch is first imported, which is after this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
