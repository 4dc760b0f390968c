"""The LoRA adapters that a worker group's requests use, against what its device holds.

A worker pins an adapter while a row uses it. So no more are started at a time than fit together; those that others
still use take no more room.
"""

from __future__ import annotations

from scheduler.core.request_spec import RequestSpec


class AdapterRoom:
    """Of one worker group."""

    def __init__(self, num_bytes: int) -> None:
        self._left = self._all = num_bytes
        self._num_users: dict[str, int] = {}

    def fits(self, spec: RequestSpec) -> bool:
        """Whether a request with this adapter can be started now."""
        return not spec.lora_key or spec.lora_key in self._num_users or spec.lora_bytes <= self._left

    def fits_alone(self, spec: RequestSpec) -> bool:
        """Whether it could if nothing else ran."""
        return spec.lora_bytes <= self._all

    def take(self, spec: RequestSpec) -> None:
        """A request is started."""
        if not spec.lora_key:
            return
        if spec.lora_key not in self._num_users:
            self._left -= spec.lora_bytes
        self._num_users[spec.lora_key] = self._num_users.get(spec.lora_key, 0) + 1

    def give_back(self, spec: RequestSpec) -> None:
        """A request has left."""
        if not spec.lora_key:
            return
        self._num_users[spec.lora_key] -= 1
        if not self._num_users[spec.lora_key]:
            del self._num_users[spec.lora_key]
            self._left += spec.lora_bytes
