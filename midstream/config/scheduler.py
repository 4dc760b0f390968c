"""Settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.config.service import GrpcServiceConfig, setting


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(GrpcServiceConfig):
    """Flags of `python -m scheduler`. Names follow TensorRT-LLM's executor configuration."""

    model: str = setting(
        "smollm2", "Model folder, GGUF file, name on the Hugging Face Hub, or `smollm2` for the embedded model."
    )
    served_model_name: str = setting("", "Model name in the API; empty: the model's own.")
    port: int = setting(50052, "gRPC port.")
    frames_port: int = setting(
        0, "TCP port for frames from other hosts, which use the gRPC port if they cannot reach it; 0: any free one."
    )
    worker_port: int = setting(50053, "ZeroMQ port to which workers connect.")
    curve: bool = setting(False, "Encrypt worker connections and accept only workers with known keys.")
    curve_secret_key: str = setting("", "File with this process's key pair, from `midstream keys`.")
    curve_worker_keys: str = setting("", "Folder with workers' public keys, NAME.key; re-read when it changes.")
    router_names: str = setting(
        "router", "Certificate names of peers that may call as routers, comma-separated: kinds, DNS names or URIs."
    )
    detokenizer_names: str = setting(
        "detokenizer", "Certificate names of peers that may read the token feed, in the same form."
    )
    capacity_policy: str = setting(
        "guaranteed_no_evict",
        "Capacity policy: which requests may hold KV blocks.",
        choices=("guaranteed_no_evict", "max_utilization", "static_batch"),
    )
    batching_type: str = setting(
        "inflight_fused", "How steps are composed.", choices=("inflight_fused", "inflight", "static")
    )
    tokens_per_block: int = setting(16, "Number of tokens in one KV block.")
    max_batch_size: int = setting(256, "Maximum number of sequences per step, in addition to each worker's limit.")
    max_num_tokens: int = setting(2048, "Maximum number of tokens per step, in addition to each worker's limit.")
    max_context_chunk: int = setting(
        0, "Maximum number of context tokens of one request per step; 0: up to max_num_tokens."
    )
    max_attention_window: int = setting(
        0, "Maximum attention window in tokens; 0: the model's. Must equal the workers'."
    )
    sink_token_length: int = setting(
        0, "Number of initial tokens that are always among max_attention_window; 0: none. Must equal the workers'."
    )
    enable_block_reuse: bool = setting(True, "Reuse KV blocks of shared prefixes.")
    enable_chunked_context: bool = setting(True, "Split long contexts over several steps.")
    pipeline_depth: int = setting(2, "Number of steps in flight per worker group.")
    max_queue_size: int = setting(
        4096, "Maximum number of queued requests; further requests fail with RESOURCE_EXHAUSTED."
    )
    heartbeat_interval_ms: int = setting(500, "Interval between worker heartbeats.")
    worker_timeout_ms: int = setting(2000, "Time without a heartbeat after which a worker group is considered lost.")
    worker_progress_timeout_ms: int = setting(
        30_000, "Time without a finished step after which a worker group is considered hung and dropped."
    )
    max_tensor_bytes: int = setting(
        1 << 30, "Maximum bytes of logits, hidden states, embeddings and attachments over all requests."
    )
    max_worker_deaths: int = setting(
        2, "Fail a request after it has crashed this many workers in a row without producing a new token."
    )
    image_cache_bytes: int = setting(256 << 20, "Maximum size of cached embeddings of images, in bytes.")
    no_worker_timeout_s: float = setting(30.0, "Seconds that a request without a deadline waits for any worker.")
    lost_kind: str = setting(
        "move",
        "What happens to a request if, for no_worker_timeout_s, no worker of the kind is left that computed its first "
        "tokens: move to another kind, which the stream reports, wait, or end.",
        choices=("move", "wait", "end"),
    )
    unload_after: float = setting(
        0.0,
        "Seconds without requests after which workers give the memory of weights and KV blocks back; the next request "
        "waits until they have loaded again. 0: never.",
    )
    orphan_grace_s: float = setting(30.0, "Seconds until a request without an attached client is aborted.")
    finished_ttl_s: float = setting(60.0, "Seconds that a finished request can still be resumed.")
    max_num_finished: int = setting(8192, "Maximum number of finished requests that are kept.")
    max_finished_tokens: int = setting(
        16_777_216, "Maximum number of prompt and output tokens of finished requests to keep."
    )
    ledger_ttl_s: int = setting(90 * 24 * 3600, "Seconds that the ledger keeps a request's usage; 0: no ledger.")
    verify: float = setting(
        0.0,
        "Share of the forward steps that another worker computes again before their results are used, 0 to 1. Workers "
        "whose results differ get no further work. Only workers on CPUs are compared.",
    )
    receipts: str = setting(
        "digests",
        "Signed receipts of ended requests. digests: they contain only digests of request and answer, which are not "
        "stored longer than otherwise. payload: requests and answers are stored as well, encrypted, for audits.",
        choices=("off", "digests", "payload"),
    )
    receipt_keys: str = setting(
        "",
        "Folder with the key pairs that sign receipts, from `midstream keys --kind receipts`. Empty: receipts in "
        "$MIDSTREAM_HOME, where a key is made if there is none.",
    )
    payload_keys: str = setting(
        "",
        "Folder with the keys that encrypt the payload, from `midstream keys --kind payload`. Required with it.",
    )
    payload_ttl_s: int = setting(7 * 24 * 3600, "Seconds that the payload is stored.")
    max_stored_bytes: int = setting(
        16 << 30,
        "Maximum bytes of files, batches and conversations that one client may store; without authentication, the "
        "limit for all clients together.",
    )
    journal: str = setting(
        "log", "Kind of journal, which stores requests and tokens.", choices=("off", "log", "postgres")
    )
    journal_path: str = setting(
        "",
        "Folder of the log. Empty: scheduler-PORT.journal in $MIDSTREAM_HOME (~/.cache/midstream).",
    )
    journal_url: str = setting("", "libpq connection string of the PostgreSQL journal; empty: the PG* variables.")
    standby: bool = setting(False, "Start as standby: wait for the journal's lease, then take over.")
    record: str = setting("", "File to which all events and plans are appended, for `midstream replay`; empty: none.")
    scheduler_plugin: str = setting("", "Custom scheduler: name of an entry point in the group `midstream.schedulers`.")
    max_message_bytes: int = setting(64 << 20, "Maximum size of a gRPC message, in bytes.")
