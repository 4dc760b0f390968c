"""LoRA: load an adapter from a PEFT folder, run one request with it and one without, and unload it.

Pass your own folder as the second argument; otherwise a random adapter for the embedded model is created. The folder
must be inside `MIDSTREAM_ADAPTER_ROOT`, as set for routers and workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from midstream.client import Client
from midstream.errors import InvalidArgumentError, MidstreamError
from midstream.executor import GenerationExecutor, LoRARequest, SamplingParams

NUM_LAYERS, HIDDEN_SIZE, RANK = 30, 576, 4


def make_adapter(folder: Path) -> Path:
    """Write a random adapter for all query projections, in PEFT's format."""
    generator, tensors = np.random.default_rng(0), {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{{}}.weight"
        tensors[name.format("A")] = generator.normal(0, 0.2, (RANK, HIDDEN_SIZE)).astype(np.float32)
        tensors[name.format("B")] = generator.normal(0, 0.2, (HIDDEN_SIZE, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def run(address: str, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with Client(address) as client, GenerationExecutor.create(address=address) as executor:
        try:
            print(client.load_lora("example", str(folder)))
        except InvalidArgumentError as error:
            raise SystemExit(
                f"{error}\nStart the service with MIDSTREAM_ADAPTER_ROOT={folder.parent}, the adapter's parent folder."
            ) from None
        without = executor.generate_async("A river is", params)
        adapted = executor.generate_async("A river is", params, lora_request=LoRARequest("example"))
        print("without:", repr(without.result().text))
        print("with it:", repr(adapted.result().text))
        client.unload_lora("example")
        print("loaded now:", [info.name for info in client.loras() if info.name == "example"])


def main(address: str = "127.0.0.1:50051", folder: str = "") -> None:
    if folder:
        run(address, Path(folder).absolute())
    else:
        with tempfile.TemporaryDirectory() as made:
            run(address, make_adapter(Path(made)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3])
    except MidstreamError as error:
        sys.exit(str(error))
