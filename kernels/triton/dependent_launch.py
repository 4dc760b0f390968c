"""Programmatic dependent launch: a kernel's programs are scheduled while those of the previous kernel are still
finishing.

This requires compute capability 9.0 or later. A kernel that is launched with `options` must call `begin` before it
accesses memory: `begin` waits until the previous kernel is complete and its results are visible, and allows the next
one to be scheduled. Since every such kernel waits, all earlier kernels are complete as well. Kernels of other libraries
in between are launched as usual.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_CAPABILITY = 90
_is_on = True


def set_dependent_launch(is_on: bool) -> None:
    """Set, for this process, whether kernels use programmatic dependent launch where the device supports it. On by
    default.
    """
    global _is_on
    _is_on = is_on


def options(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments for programmatic dependent launch."""
    is_dependent = _is_on and capability(device) >= _CAPABILITY
    return {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}


@functools.cache
def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU times ten; 0 for a CPU, on which Triton's interpreter runs."""
    return 0 if device.type == "cpu" else int(driver.active.get_current_target().arch)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start; without IS_DEPENDENT do nothing."""
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
