"""A logits post-processor: your own code, selected by name, called with the tokens so far and the client id.

`count_up` is in the package tests/gpu_worker/example_post_processor; install it where the workers run. It makes each
token id the previous one plus the length of the client id.
"""

from __future__ import annotations

import sys

from midstream.errors import InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.executor import GenerationExecutor, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, logits_processor="count_up")
    with GenerationExecutor.create(address=address) as executor:
        for client_id in ("ann", "robert"):
            try:
                output = executor.generate([400, 500], params, client_id=client_id)
            except (InvalidArgumentError, UnsupportedError) as error:
                raise SystemExit(
                    f"{error}\nInstall tests/gpu_worker/example_post_processor where the workers run."
                ) from None
            print(client_id, output.outputs[0].token_ids)
        try:
            executor.generate([400, 500], SamplingParams(logits_processor="unheard_of"))
        except InvalidArgumentError as error:
            print(error)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
