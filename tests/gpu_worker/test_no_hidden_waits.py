"""Neither the recording of CUDA graphs nor the sampling after a graph reads values from the device or mixes devices.

Tensors of the `meta` device stand in for a GPU's: they have no values, so anything that reads one (`item`, `tolist`,
`nonzero`, a condition) raises. So does an operation of a graph that mixes them with CPU tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu.model import TINY, random_decoder
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.features import Feature
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.decoder import TorchDecoder
from gpu_worker.models.families import describe
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of
from gpu_worker.sampling.guided import Constraints
from gpu_worker.sampling.sampler import Sampler
from kernels import Activation, dispatch
from midstream.model.folder import open_model_folder
from tests.gpu_worker.one_device import META, run_on_one_device
from tests.gpu_worker.test_families import MODELS
from tests.gpu_worker.tiny_models import ints, make_tiny_model

# There is one model for each kind of layer: grouped queries, experts, soft caps and windows, sinks, chunks, norms of
# whole rows.
NAMES = ["llama", "qwen3_moe", "gemma2", "gpt_oss", "llama4_text", "olmo2"]


def on_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Reject CPU tensors, which a kernel could not read."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        assert all(tensor.device == META for tensor in tensors), [tensor.device for tensor in tensors]
        return run(*args, **{key: value for key, value in kwargs.items() if key != "is_batch_invariant"})

    return checked


def attend(q: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], values.shape[-1])


def group(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None,
    num_repeats: int,
    is_partial: bool,
) -> Tensor:
    assert not is_partial
    assert len(x) * num_repeats == len(experts)
    return x.new_empty(len(experts), weight.shape[1] // (1 if activation is None else 2))


@pytest.fixture(autouse=True)
def kernels_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Triton kernels with functions that only return tensors of the right shape."""
    references = vars(dispatch)
    made: dict[str, Callable[..., Any]] = {
        "rms_norm": references["torch_rms_norm"],
        "add_rms_norm": references["torch_add_rms_norm"],
        "apply_rotary": references["torch_apply_rotary"],
        "activate": references["torch_activate"],
        "linear": references["torch_linear"],
        "gated_linear": references["torch_gated_linear"],
        "quantized_linear": references["torch_quantized_linear"],
        "rotate_and_store": lambda q, *args, **kwargs: q.new_empty(q.shape),
        "store_kv": lambda *args, **kwargs: None,
        "add_lora": lambda *args: None,
        "paged_attention": attend,
        "grouped_linear": group,
        "weighted_sum": references["torch_weighted_sum"],
        "sample": lambda logits, *args, **kwargs: logits.new_empty(len(logits), dtype=torch.int32),
    }
    monkeypatch.setattr(dispatch, "triton", types.SimpleNamespace(**{k: on_device(v) for k, v in made.items()}), False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: x.device == META)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[torch.zeros(2, dtype=torch.int64)],
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64)),
        lambda x: x.index_put_((torch.zeros(2, dtype=torch.int64),), x[0]),
        lambda x: x @ torch.zeros(5, 5),
        lambda x: x.copy_(torch.zeros(4, 5)),
        lambda x: torch.zeros(5).to(META),
        lambda x: torch.tensor([1.0], device=META),
    ],
)
def test_operations_that_a_graph_cannot_record_are_refused(run: Callable[[Tensor], object]) -> None:
    x = torch.empty(4, 5, device=META)
    run(x)
    with pytest.raises(AssertionError):
        run_on_one_device(lambda: run(x))


@pytest.mark.parametrize(("name", "weights"), [*((name, "bf16") for name in NAMES), ("qwen3_moe", "int8")])
def test_recorded_steps_read_nothing_from_the_device(tmp_path: Path, name: str, weights: str) -> None:
    family, settings = MODELS[name]
    make_tiny_model(tmp_path, family, **settings)
    folder = open_model_folder(str(tmp_path))
    description = describe(folder.config)
    decoder = TorchDecoder(description, DecoderWeights(folder, description, weights), torch.bfloat16, META)
    decoder.reserve_adapters(1 << 16, 8)
    num_recorded = 0

    def record(run: Callable[[], object]) -> Callable[[], None]:
        nonlocal num_recorded
        num_recorded += 1
        run_on_one_device(run)
        return lambda: None

    graphs = GraphDecoder(
        decoder,
        META,
        max_batch_size=4,
        max_num_tokens=64,
        max_blocks=4,
        make_recorder=lambda: record,
        takes_adapters=True,
        draws=True,
    )
    graphs.use_cache(KvCache(description, 16, 16, torch.bfloat16, META))
    graphs.capture()
    # Graphs are recorded for three batch sizes and two mixed steps, each with and without adapters; draws for three
    # batch sizes, with and without top-k and top-p.
    assert num_recorded == 10 + 6


class RecordingCommunicator:
    """Stands in for the other rank of a stage, and records the operations."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sum(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return x

    def join(self, x: Tensor) -> Tensor:
        self.calls.append("join")
        return torch.cat((x, x), dim=1)

    def share(self, x: Tensor) -> None:
        assert x.device == META
        self.calls.append("share")


def test_the_recorded_steps_of_a_rank_begin_with_the_tokens_of_the_previous_step() -> None:
    communicator = RecordingCommunicator()
    description = describe(TINY)
    shard = shard_of(description, Ranks(rank=1, world_size=2, tensor_size=2))
    decoder = random_decoder(TINY, META, torch.bfloat16, shard, communicator)
    num_recorded = 0

    def record(run: Callable[[], object]) -> Callable[[], None]:
        nonlocal num_recorded
        num_recorded += 1
        communicator.calls.clear()
        run_on_one_device(run)
        # Each layer has two sums; embeddings are summed, and logits are joined.
        assert communicator.calls == ["share", *["sum"] * (1 + 2 * description.num_layers), "join"] * 2
        return lambda: None

    graphs = GraphDecoder(
        decoder,
        META,
        max_batch_size=2,
        max_num_tokens=32,
        max_blocks=4,
        make_recorder=lambda: record,
        share=communicator.share,
    )
    graphs.use_cache(KvCache(shard.part, 8, 16, torch.bfloat16, META))
    graphs.capture()
    assert num_recorded == 3


def test_plain_sampling_reads_nothing_from_the_device() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=4, top_p=0.5, min_p=0.1)]
    rows = Rows(3, 64, 16, 64, 50)
    for row, sampling in enumerate(params):
        rows.add(NewSequence(row=row, token_ids=ints([1, 2]), num_prompt_tokens=2, sampling=sampling))
    chosen = Sampler(rows).choose(torch.empty(3, 50, device=META), np.arange(3, dtype=np.int32))
    assert chosen.values.device == META
    assert chosen.values.shape == (3,)


def test_sampling_with_features_reads_nothing_from_the_device() -> None:
    features = SamplingParams(
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        embedding_bias=((0, 1.0),),
        bad_words=((1,), (2, 4)),
        no_repeat_ngram_size=1,
        allowed_token_ids=(1, 2, 3),
        min_tokens=5,
        end_ids=(2,),
        log_probs=3,
    )
    rows = Rows(2, 64, 16, 64, 50)
    for row in range(2):
        rows.add(NewSequence(row=row, token_ids=ints([1, 2]), num_prompt_tokens=1, sampling=features))
    rows.features[1] |= np.uint16(Feature.GUIDED)
    constraints = Constraints({1: np.full(7, 255, dtype=np.uint8)})
    chosen = Sampler(rows).choose(torch.empty(2, 50, device=META), ints([0, 1]), constraints)
    assert chosen.values.device == META
    # Each row has its token and, for log probabilities, the token's own value and rank, and three top tokens with their
    # values.
    assert chosen.values.shape == (2 + 2 * (2 + 2 * 3),)
