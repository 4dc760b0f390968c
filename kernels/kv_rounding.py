"""Keys and values as a cache of 8 bits with fixed scales would hold them, for checkpoints that were made for such a
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class KvRounding:
    """Rounds the keys and values of one layer.

    Attributes:
        key_scale, value_scale: What is stored is a key or value divided by its scale.
        is_integer: Whether that is stored as int8, rather than as float8 (e4m3).
    """

    key_scale: float
    value_scale: float
    is_integer: bool = False

    def keys(self, k: Tensor) -> Tensor:
        """Round keys of any shape."""
        return self._rounded(k, self.key_scale)

    def values(self, v: Tensor) -> Tensor:
        """Round values of any shape."""
        return self._rounded(v, self.value_scale)

    def _rounded(self, x: Tensor, scale: float) -> Tensor:
        steps = x.float() / scale
        if self.is_integer:
            stored = steps.clamp(-128, 127).round()
        else:
            stored = steps.clamp(-_FLOAT8_LARGEST, _FLOAT8_LARGEST).to(torch.float8_e4m3fn).float()
        return (stored * scale).to(x.dtype)
