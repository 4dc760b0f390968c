"""Tensors and metrics: prompt and output logits, hidden states of a layer, top logits, performance metrics."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from midstream.errors import MidstreamError
from midstream.executor import AdditionalModelOutput, GenerationExecutor, SamplingParams


def show(name: str, tensor: Any) -> None:
    values = np.asarray(tensor)  # a torch.Tensor, if torch is installed
    print(f"{name}: {values.dtype}{list(values.shape)}, from {values.min():.3f} to {values.max():.3f}")


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=4,
        return_context_logits=True,
        return_generation_logits=True,
        additional_model_outputs=[
            AdditionalModelOutput("hidden_states.30", True),
            AdditionalModelOutput("topk_logits.3"),
        ],
        return_perf_metrics=True,
    )
    with GenerationExecutor.create(address=address) as executor:
        result = executor.generate("A river is", params)
    output = result.outputs[0]
    show("context logits", result.context_logits)
    show("generation logits", output.generation_logits)
    for name, tensor in result.additional_context_outputs.items():
        show(f"{name} of the prompt", tensor)
    for name, tensor in output.additional_generation_outputs.items():
        show(name, tensor)
    assert result.perf_metrics is not None
    waited = result.perf_metrics.first_scheduled_unix_ns - result.perf_metrics.arrival_unix_ns
    print(f"{result.perf_metrics.num_steps} steps, {waited / 1e6:.1f} ms in the queue")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
