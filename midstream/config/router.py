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
    served_model_name: str = setting("", "Name of the model in the API; empty: its own.")
    generation_config: str = setting(
        "auto",
        "Sampling defaults: auto takes what the model's generation_config.json recommends, none the service's own.",
        choices=("auto", "none"),
    )
    port: int = setting(50051, "gRPC port.")
    http_port: int = setting(8000, "HTTP port.")
    schedulers: str = setting(
        "127.0.0.1:50052", "Comma-separated scheduler targets, one per cell; a dns:/// target is resolved anew."
    )
    detokenizers: str = setting(
        "127.0.0.1:50054", "Comma-separated detokenizer targets; a dns:/// target is resolved anew."
    )
    max_pending_bytes: int = setting(1 << 20, "Bytes waiting for one slow reader before its stream is cut.")
    max_tensor_bytes: int = setting(256 << 20, "Bytes of logits and hidden states that one request may ask for.")
    max_beam_width: int = setting(16, "Widest beam search that a request may ask for.")
    max_message_bytes: int = setting(64 << 20, "Largest gRPC message.")
    allowed_hosts: str = setting(
        "",
        "Comma-separated host names by which clients call the HTTP port, * for any; empty: on a loopback address "
        "those of this machine, on others any.",
    )
    max_body_bytes: int = setting(0, "Largest HTTP body; 0: 2 MiB and 128 bytes for each token of the context.")
    max_concurrent_streams: int = setting(4096, "Streams at once on this router.")
    max_streams_per_client: int = setting(1024, "Streams at once of one client, or address where none is known.")
    auth: str = setting(
        "none", "How clients are known; mtls: by their certificates.", choices=("none", "token", "mtls")
    )
    auth_tokens: str = setting(
        "",
        "File with lines of `TOKEN CLIENT_ID [ROLE,...]`, re-read when it changes. Roles are generate, observe and "
        "admin; without them generate,observe.",
    )
    auth_roles: str = setting(
        "", "With auth mtls: file with lines of `CLIENT_ID ROLE,...`; clients not in it may generate,observe."
    )
    anonymous_roles: str = setting(
        "",
        "Roles of callers without credentials; empty: with auth none all on a loopback address and generate,observe on "
        "others, else none. Beside auth token or mtls it can be observe, for monitoring.",
    )
    share_prefix_cache: bool = setting(
        False,
        "Share cached prefixes between authenticated clients. It is faster where they send the same prompts, and lets "
        "each find out by timing what others sent.",
    )
    adapter_root: str = setting(
        "", "Folder under which adapters may be loaded by path; empty: requests name loaded adapters only."
    )
    tls_require_client_cert: bool = setting(False, "Take only clients with a certificate of the authorities.")
    unavailable_timeout_s: float = setting(
        30.0, "Seconds that a request without a deadline waits for a part that is away."
    )
    response_ttl_s: int = setting(7 * 24 * 3600, "Seconds that a response of the Responses API is stored.")
    trace_ratio: float = setting(1.0, "Share, 0 to 1, of requests traced where the client's traceparent does not say.")
    tool_parser: str = setting(
        "auto", "How the model writes tool calls; auto: as its chat template tells; none: they are not read."
    )
    reasoning_parser: str = setting("auto", "How the model marks its reasoning; auto and none as for tool_parser.")
    access_log: bool = setting(False, "Log a line for each request that ends: how, how many tokens, how long.")
    throughput_log_s: float = setting(
        10.0, "Seconds between lines in the log with tokens per second and open streams, while there are any; 0: none."
    )
    num_tokenizer_threads: int = setting(2, "Threads that tokenize and render templates.")
