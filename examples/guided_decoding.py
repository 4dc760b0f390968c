"""Guided decoding: output constrained by a JSON schema, any JSON, a regular expression, or a grammar."""

from __future__ import annotations

import json
import sys

from midstream.errors import MidstreamError
from midstream.executor import GenerationExecutor, GuidedDecodingParams, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = {
    "schema": GuidedDecodingParams(json=SCHEMA),
    "json": GuidedDecodingParams(json_object=True),
    "expression": GuidedDecodingParams(regex="(red|green|blue) fox(es)?"),
    "grammar": GuidedDecodingParams(grammar='root ::= number (" + " number)+ " = " number\nnumber ::= [0-9]{1,2}'),
}


def main(address: str = "127.0.0.1:50051") -> None:
    params = [SamplingParams(seed=3, top_p=1.0, max_tokens=48, guided_decoding=guide) for guide in GUIDES.values()]
    with GenerationExecutor.create(address=address) as executor:
        results = executor.generate(["Here is what you asked for: "] * len(params), params)
    for name, result in zip(GUIDES, results, strict=True):
        print(f"{name}: {result.outputs[0].text}")
    print("parsed:", json.loads(results[0].outputs[0].text))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
