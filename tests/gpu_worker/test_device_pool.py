"""KV pools in device memory: blocks are copied whole, and tiers below such a pool change no output. A CPU stands in for
the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.kv.cache import KvCache, block_bytes
from gpu_worker.kv.device_pool import DevicePool
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.families import describe
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.test_device import TINY

NUM_BLOCKS = 5


class HashesThatChange:
    """Hashes that change: each read returns the next value."""

    def __init__(self, *values: int) -> None:
        self._values = iter(values)

    def __getitem__(self, block: int) -> int:
        return next(self._values)


def make_parts() -> list[torch.Tensor]:
    """Return random bfloat16 keys, no values (as with latent attention), scales and recurrent states."""
    return [
        torch.randn(3, NUM_BLOCKS, 4, 2, 8, dtype=torch.bfloat16),
        torch.empty(3, NUM_BLOCKS, 4, 2, 0, dtype=torch.bfloat16),
        torch.randn(3, NUM_BLOCKS, 4, 2),
        torch.randn(1, NUM_BLOCKS, 6),
    ]


def make_pool(parts: list[torch.Tensor]) -> DevicePool:
    """Return a pool whose block i has the hash 100 + i."""
    return DevicePool(np.arange(100, 100 + NUM_BLOCKS, dtype=np.uint64), parts)


def test_a_block_is_copied_with_all_its_parts() -> None:
    source, target = make_parts(), make_parts()
    before = [part.clone() for part in target]
    contents = make_pool(source).read(3, 103)
    assert contents is not None
    assert len(contents) == 3 * 4 * 2 * 8 * 2 + 3 * 4 * 2 * 4 + 6 * 4
    make_pool(target).write(1, contents)
    for part, from_part, old in zip(target, source, before, strict=True):
        assert torch.equal(part[:, 1], from_part[:, 3])
        others = [0, 2, 3, 4]
        assert torch.equal(part[:, others], old[:, others])


@pytest.mark.parametrize("hashes", [(7, 103), (103, 0), (103, 104)])
def test_a_block_that_changes_is_not_read(hashes: tuple[int, ...]) -> None:
    pool = make_pool(make_parts())
    pool._hashes = HashesThatChange(*hashes)  # type: ignore[assignment]
    assert pool.read(3, 103) is None


def test_a_quantized_cache_keeps_its_scales() -> None:
    description, dtype = describe(TINY), torch.float8_e4m3fn
    cache = KvCache(description, NUM_BLOCKS, 4, dtype, torch.device("cpu"))
    cache.block_hashes[:] = 9
    cache.key_scales[:, 2], cache.value_scales[:, 2] = 3.0, 5.0
    contents = cache.memory.read(2, 9)
    assert contents is not None
    assert len(contents) == block_bytes(description, 4, dtype) == cache.num_bytes // NUM_BLOCKS
    cache.memory.write(4, contents)
    assert (cache.key_scales[:, 4] == 3.0).all()
    assert (cache.value_scales[:, 4] == 5.0).all()
    assert not cache.key_scales[:, 3].any()


def test_tiers_below_a_device_change_no_output(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker starts with what the first one stored, and steps take the code path of a GPU."""
    monkeypatch.setattr(
        KvCache, "memory", property(lambda cache: DevicePool(cache.block_hashes, [cache.keys, cache.values]))
    )
    requests = [
        pb.GenerateRequest(
            request_id=f"request {number}",
            token_ids=pb.TokenIds(values=[5 + number, *range(20, 60)]),
            max_tokens=12,
            sampling=pb.SamplingConfig(seed=number, temperature=0.5 * number),
        )
        for number in range(3)
    ]
    outputs, hits = [], []
    for disk_folder in ("", str(tmp_path / "disk"), str(tmp_path / "disk")):
        config = WorkerConfig(
            device="cpu",
            max_kv_tokens=512,
            max_batch_size=8,
            num_threads=1,
            kernels="torch",
            tokens_per_block=8,
            disk_kv_folder=disk_folder,
        )
        runner = ModelRunner(config, open_model_folder(str(tiny_folder)), runs_ahead=True)
        system = CoreWithRunners(runner, (2,), max_batch_size=8, enable_block_reuse=True)
        outputs.append([contents(request) for request in system.run(requests)])
        if runner.kv.tiers is not None:
            assert runner.kv.tiers.wait_until_stored(30)
            hits.append(runner.kv.tiers._tiers[0].num_hits)
        runner.close()
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    assert hits[0] == 0
    assert hits[1] >= 15
