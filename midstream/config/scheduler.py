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
    served_model_name: str = setting("", "Name of the model in the API; empty: its own.")
    port: int = setting(50052, "gRPC port.")
    frames_port: int = setting(0, "TCP port of frames, for peers on other hosts; 0 picks a free one.")
    worker_port: int = setting(50053, "ZeroMQ port that workers dial.")
    curve: bool = setting(False, "Encrypt the workers' links and take only workers whose keys are known.")
    curve_secret_key: str = setting("", "File with this process's key pair, from `midstream keys`.")
    curve_worker_keys: str = setting("", "Folder with workers' public keys, NAME.key; re-read when it changes.")
    router_names: str = setting(
        "router", "Comma-separated names in certificates of those that may call as routers: kinds, DNS names or URIs."
    )
    detokenizer_names: str = setting("detokenizer", "The same of those that may read the token feed.")
    capacity_policy: str = setting(
        "guaranteed_no_evict",
        "Which requests may hold KV blocks.",
        choices=("guaranteed_no_evict", "max_utilization", "static_batch"),
    )
    batching_type: str = setting(
        "inflight_fused", "How steps are made up.", choices=("inflight_fused", "inflight", "static")
    )
    tokens_per_block: int = setting(16, "Tokens in one KV block.")
    max_batch_size: int = setting(256, "Sequences in one step, over all workers' own limits.")
    max_num_tokens: int = setting(2048, "Tokens in one step, over all workers' own limits.")
    max_context_chunk: int = setting(0, "Context tokens of one request in one step; 0: up to max_num_tokens.")
    max_attention_window: int = setting(
        0, "Most tokens that any layer attends to; 0: as the model says. Must equal the workers'."
    )
    enable_block_reuse: bool = setting(True, "Reuse KV blocks of shared prefixes.")
    enable_chunked_context: bool = setting(True, "Split long contexts over steps.")
    pipeline_depth: int = setting(2, "Steps in flight per worker group.")
    max_queue_size: int = setting(4096, "Requests that may wait before RESOURCE_EXHAUSTED.")
    heartbeat_interval_ms: int = setting(500, "How often workers report.")
    worker_timeout_ms: int = setting(2000, "Silence after which a worker group is given up.")
    worker_progress_timeout_ms: int = setting(
        30_000, "Time without a finished step after which a worker group that still reports is given up."
    )
    max_tensor_bytes: int = setting(1 << 30, "Bytes of logits and hidden states that requests may ask for together.")
    max_worker_deaths: int = setting(
        2, "Fail a request after it crashes this many workers in a row without a new token."
    )
    no_worker_timeout_s: float = setting(30.0, "Seconds that a request without a deadline waits for any worker.")
    orphan_grace_s: float = setting(30.0, "Seconds that a request nobody is attached to lives on.")
    finished_ttl_s: float = setting(60.0, "Seconds that a finished request can still be resumed.")
    max_num_finished: int = setting(8192, "Finished requests that are kept.")
    max_finished_tokens: int = setting(16_777_216, "Prompt and output tokens of the finished requests that are kept.")
    ledger_ttl_s: int = setting(90 * 24 * 3600, "Seconds that the ledger keeps what a request took; 0: no ledger.")
    journal: str = setting("log", "Where requests and tokens are kept.", choices=("off", "log", "sqlite", "postgres"))
    journal_path: str = setting(
        "",
        "Folder of a log, or file of a journal in SQLite; empty: scheduler-PORT.journal or scheduler-PORT.sqlite in "
        "$MIDSTREAM_HOME (~/.cache/midstream).",
    )
    journal_url: str = setting("", "Where the journal in PostgreSQL is, as libpq takes it; empty: the PG* variables.")
    standby: bool = setting(False, "Wait until the scheduler that has the journal's lease is gone, then take over.")
    record: str = setting("", "File to which all events and plans are appended, for `midstream replay`; empty: none.")
    scheduler_plugin: str = setting("", "Entry point of a scheduler of your own, in the group midstream.schedulers.")
    max_message_bytes: int = setting(64 << 20, "Largest gRPC message.")
