"""Resume: a client disconnects from a detached request, and another client resumes it at the last offset."""

from __future__ import annotations

import sys

from midstream.client import Client, SamplingParams
from midstream.errors import MidstreamError


def main(address: str = "127.0.0.1:50051") -> None:
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with Client(address) as client:
        stream = client.generate("Once upon a time", sampling=sampling, detached=True)
        first = next(iter(stream))
        stream.cancel()
    print(f"the first has {first.text!r} and leaves")

    with Client(address) as client:
        rest = client.resume(stream.request_id, from_token=first.token_offset + len(first.token_ids)).result()
        print(f"the second has {rest.text!r}")
        whole = client.generate("Once upon a time", sampling=sampling).result()
    print("together:", list(first.token_ids) + rest.token_ids == whole.token_ids)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
