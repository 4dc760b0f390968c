"""The worker: executes the scheduler's steps on a model."""

import os

# PyTorch's own threads busy-wait for milliseconds after each operation, and thus occupy the cores that the kernels'
# threads need next. PyTorch reads this variable when it is first imported, which is after this line.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
