"""Scheduling options: priority, deadline, client id, cache salt, and KV block retention."""

from __future__ import annotations

import sys
from datetime import timedelta

from midstream.errors import DeadlineError, MidstreamError
from midstream.executor import GenerationExecutor, KvCacheRetentionConfig, SamplingParams

SYSTEM = "You are a careful assistant who answers in full sentences and never guesses. " * 4


def main(address: str = "127.0.0.1:50051") -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    keep = KvCacheRetentionConfig(
        token_range_retention_configs=[
            KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 64, 90, timedelta(minutes=1))
        ],
        decode_retention_priority=10,
    )
    with GenerationExecutor.create(address=address) as executor:
        for salt in ("tenant-1", "tenant-1", "tenant-2"):
            result = executor.generate(
                f"{SYSTEM}Say hello.",
                params,
                priority=0.75,
                client_id=salt,
                cache_salt=salt,
                kv_cache_retention_config=keep,
            )
            assert result.usage is not None
            print(f"{salt}: {result.usage.cached_tokens} of {result.usage.prompt_tokens} prompt tokens were cached")
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        try:
            executor.generate("On and on", endless, timeout_s=0.5)
        except DeadlineError as error:
            print("a deadline:", error)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except MidstreamError as error:
        sys.exit(str(error))
