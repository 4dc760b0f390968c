"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.config.service import GrpcServiceConfig, setting


@dataclass(frozen=True, kw_only=True)
class RouterConfig(GrpcServiceConfig):
    """Flags of `python -m router`."""

    model: str = setting(
        "smollm2", "Model folder, GGUF file, name on the Hugging Face Hub, or `smollm2` for the embedded model."
    )
    served_model_name: str = setting("", "Model name in the API; empty: the model's own.")
    models: str = setting(
        "",
        "TOML file with a table [NAME] for each model behind this router: model, schedulers and detokenizers, and "
        "optionally model_aliases, generation_config, tool_parser, reasoning_parser, adapter_root and update_root, "
        "which mean the same as the settings. A request without a model goes to the first. Empty: one model, given by "
        "the settings.",
    )
    model_aliases: str = setting("", "Comma-separated other names that requests may use for the model.")
    generation_config: str = setting(
        "auto",
        "Sampling defaults: auto uses the model's generation_config.json, none the service's own.",
        choices=("auto", "none"),
    )
    port: int = setting(50051, "gRPC port.")
    http_port: int = setting(8000, "HTTP port.")
    shared_port: int = setting(
        0,
        "Another gRPC port, on which all routers of this user on the host may listen; each connection goes to one of "
        "them. 0: none.",
    )
    shared_http_port: int = setting(0, "Another HTTP port, shared in the same way; 0: none.")
    schedulers: str = setting(
        "127.0.0.1:50052",
        "Comma-separated scheduler targets, one per cell; dns:/// targets are re-resolved. one-of:TARGET|TARGET is a "
        "cell with a standby: whichever scheduler is active.",
    )
    detokenizers: str = setting(
        "127.0.0.1:50054", "Comma-separated detokenizer targets; dns:/// targets are re-resolved."
    )
    max_pending_bytes: int = setting(1 << 20, "Maximum bytes buffered for a slow reader before its stream is closed.")
    max_tensor_bytes: int = setting(256 << 20, "Maximum bytes of logits and hidden states per request.")
    max_beam_width: int = setting(16, "Maximum beam width of a request.")
    max_message_bytes: int = setting(64 << 20, "Maximum size of a gRPC message, in bytes.")
    allowed_hosts: str = setting(
        "",
        "Comma-separated Host headers accepted on the HTTP port, * for any; empty: the names of this machine on a "
        "loopback address, any name on other addresses.",
    )
    cors_origins: str = setting(
        "",
        "Comma-separated origins, such as https://chat.example, of web pages that may call the HTTP port from a "
        "browser; * for any; empty: none.",
    )
    max_body_bytes: int = setting(
        0, "Maximum size of an HTTP body, in bytes; 0: 2 MiB plus 128 bytes per token of the context."
    )
    max_concurrent_streams: int = setting(4096, "Maximum concurrent streams on this router.")
    max_streams_per_client: int = setting(
        1024, "Maximum concurrent streams per client, or per address for clients without an id."
    )
    auth: str = setting(
        "none", "How clients authenticate; mtls: by client certificate.", choices=("none", "token", "mtls")
    )
    auth_tokens: str = setting(
        "",
        "File with lines of `TOKEN CLIENT_ID [ROLE,...] [QUOTA=N ...]`, re-read when it changes. A token may be "
        "given as sha256:DIGEST. Roles are generate, observe and admin; without them generate,observe. Quotas are "
        "requests_per_minute, tokens_per_minute, max_concurrent and priority.",
    )
    auth_roles: str = setting(
        "",
        "With auth mtls: file with lines of `CLIENT_ID [ROLE,...] [QUOTA=N ...]`; clients not in it may "
        "generate,observe.",
    )
    anonymous_roles: str = setting(
        "",
        "Roles of callers without credentials. Empty: with auth none, all roles on a loopback address and "
        "generate,observe on others; otherwise no role. With auth token or mtls it can be observe, for monitoring.",
    )
    share_prefix_cache: bool = setting(
        False,
        "Share cached prefixes between authenticated clients. This is faster if they send the same prompts, but "
        "clients can infer from timing what others sent.",
    )
    update_root: str = setting(
        "",
        "Folder below which UpdateWeights may load weights, the same for routers and workers. Empty: only the served "
        "model's own folder.",
    )
    adapter_root: str = setting(
        "", "Folder from which adapters may be loaded by path; empty: requests can only name loaded adapters."
    )
    tls_require_client_cert: bool = setting(False, "Accept only clients with a certificate signed by the CAs.")
    unavailable_timeout_s: float = setting(
        30.0, "Seconds that a request without a deadline waits for an unavailable component."
    )
    keepalive_interval_s: float = setting(
        10.0,
        "Seconds without output after which a stream gets a message without output, so that proxies and clients keep "
        "it open while a request waits; 0: never.",
    )
    drain_delay_s: float = setting(
        3.0,
        "Seconds after SIGTERM for which the router still accepts calls while its health says that it stops, so that "
        "proxies and load balancers notice; part of drain_timeout_s.",
    )
    response_ttl_s: int = setting(7 * 24 * 3600, "Seconds that a response of the Responses API is stored.")
    max_file_bytes: int = setting(200 << 20, "Maximum size of a file that clients may upload for batches, in bytes.")
    file_ttl_s: int = setting(30 * 24 * 3600, "Maximum number of seconds that files and batch outputs are stored.")
    max_batch_lines: int = setting(64, "Maximum number of batch lines that this router runs concurrently.")
    trace_ratio: float = setting(
        1.0, "Fraction, 0 to 1, of requests without a traceparent from the client that are traced."
    )
    tool_parser: str = setting(
        "auto", "Format of the model's tool calls; auto: detected from its chat template; none: not parsed."
    )
    reasoning_parser: str = setting("auto", "Format of the model's reasoning; auto and none as for tool_parser.")
    access_log: bool = setting(
        False, "Log a line for each finished request with its finish reason, token counts and duration."
    )
    throughput_log_s: float = setting(
        10.0, "Seconds between log lines with throughput and open streams, while there are any; 0: no such lines."
    )
    num_tokenizer_threads: int = setting(
        2,
        "Number of threads that tokenize and render templates for one client; should be less than the number of "
        "processors.",
    )
