"""Batches over HTTP: upload requests as a file, wait until they are done, and download the answers."""

from __future__ import annotations

import json
import os
import sys
import time

import openai


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("MIDSTREAM_API_KEY", "none")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        (model,) = [card.id for card in client.models.list().data][:1]
        lines = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0},
            }
            for number, prompt in enumerate(("A river is", "A mountain is", "A lake is"))
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "an example"}
        )
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        print(f"the batch is {batch.status}")
        assert batch.output_file_id is not None
        for line in client.files.content(batch.output_file_id).text.splitlines():
            result = json.loads(line)
            print(f"{result['custom_id']}: {result['response']['body']['choices'][0]['text']!r}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except openai.OpenAIError as error:
        sys.exit(f"{error} Is the service running, and is MIDSTREAM_API_KEY set if it needs a key?")
