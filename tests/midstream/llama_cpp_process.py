"""Run by a Python with the package xllamacpp: `python llama_cpp_process.py FILE.gguf`.

Standard input has a JSON object: `texts` to tokenize, and optionally `embeds`, a text whose embedding is returned (that
of its last token, unless `has_pooling` says that the file names another way), and `continues`, tokens to continue
greedily without end. The answer is a JSON object in the last line of standard output; the other lines are llama.cpp's
log.
"""

import json
import os
import sys
import urllib.request
from typing import Any

import xllamacpp


def main() -> None:
    asked = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.port = 0
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 128, 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = 5
    if "embeds" in asked:
        params.embedding = True
        if not asked.get("has_pooling"):
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST
    server = xllamacpp.Server(params)

    def post(path: str, **body: object) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as answer:
            return json.load(answer)

    made = {
        name: [
            post("/tokenize", content=text, add_special=special, parse_special=special)["tokens"]
            for text in asked["texts"]
        ]
        for name, special in (("tokens", True), ("plain", False))
    }
    if "embeds" in asked:
        made["embedding"] = post("/v1/embeddings", input=asked["embeds"])["data"][0]["embedding"]
    if "continues" in asked:
        settings = {"n_predict": 16, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        made["text"] = post("/completion", prompt=asked["continues"], **settings)
    print(json.dumps(made), flush=True)
    os._exit(0)  # the server's destructor sometimes waits for ever


main()
