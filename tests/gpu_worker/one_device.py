"""Rejects operations that a CUDA graph cannot record; tensors of the `meta` device stand in for a GPU's.

Most operations of `meta` tensors accept CPU tensors, for example as indices. A GPU's operations either raise an error
or copy them first, and wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_COPIES = {torch.ops.aten.copy_, torch.ops.aten._to_copy}
_COPIES_OF_NUMBERS = {torch.tensor, torch.as_tensor, Tensor.new_tensor}


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, operations that use both CPU and `meta` tensors raise AssertionError.

    CPU tensors without dimensions are allowed, except in copies: a kernel launch takes them as arguments, like numbers.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_copy = function.overloadpacket in _COPIES
        tensors = [item for item in tree_leaves((args, kwargs, result)) if isinstance(item, Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.dim() or is_copy}
        assert len(devices) <= 1 or META not in devices, f"{function} uses {sorted(map(str, devices))}"
        return result


class NoNumbers(TorchFunctionMode):
    """Within this context, creating a `meta` tensor from the host's numbers raises AssertionError; `OneDevice` cannot
    detect this, because no operation is dispatched.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        assert function not in _COPIES_OF_NUMBERS or result.device != META, f"{function.__name__} copies to the device"
        return result


def run_on_one_device(run: Callable[[], object]) -> None:
    """Call a function as `GraphRecorder` does: once without restrictions, and then as in the recording."""
    run()
    with OneDevice(), NoNumbers():  # type: ignore[no-untyped-call]
        run()
