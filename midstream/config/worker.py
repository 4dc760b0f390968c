"""Settings of the GPU (or CPU) worker."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.config.service import ServiceConfig, setting


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """Flags of `python -m gpu_worker`."""

    model: str = setting(
        "smollm2", "Model folder, GGUF file, name on the Hugging Face Hub, or `smollm2` for the embedded model."
    )
    draft_model: str = setting("", "Smaller draft model with the same vocabulary; empty: none.")
    scheduler: str = setting(
        "tcp://127.0.0.1:50053",
        "ZeroMQ address of the scheduler; with a standby, one-of:ADDRESS|ADDRESS, or one-of: and a name with several "
        "addresses.",
    )
    curve: bool = setting(False, "Encrypt the connection to the scheduler and authenticate with a key.")
    curve_secret_key: str = setting("", "File with this process's key pair, from `midstream keys`.")
    curve_server_key: str = setting("", "File with the scheduler's public key.")
    group_id: str = setting(
        "", "Name of the worker group; by default HOSTNAME-NAME, or HOSTNAME-PID if the worker has no name."
    )
    device: str = setting("auto", "cpu, cuda, cuda:N; auto: CUDA if available.")
    weights: str = setting(
        "auto", "Weight storage type; auto: as in the file.", choices=("auto", "f32", "bf16", "int8", "q4")
    )
    kv: str = setting(
        "auto",
        "KV cache storage; auto: int16 with a scale for each token and head on CPU kernels, else the compute type, "
        "after rounding by the checkpoint's scales of a KV cache, if it has them. On a GPU, int8 and f8 (float8 e4m3) "
        "have the same kind of scales.",
        choices=("auto", "f32", "bf16", "int16", "int8", "f8"),
    )
    activations: str = setting(
        "auto",
        "Activation type of quantized and bf16 layers on CPU kernels; auto: int16, with negligible loss. On a GPU f8 "
        "multiplies float8 weights with a scale per row or matrix as float8.",
        choices=("auto", "f32", "int16", "int8", "f8"),
    )
    kernels: str = setting("auto", "CPU kernel implementation.", choices=("auto", "native", "torch"))
    cpu_isa: str = setting(
        "auto",
        "Instruction set of the CPU kernels; auto: the first that the processor supports and whose check passes; "
        "reference: PyTorch's operations.",
        choices=("auto", "amx", "avx512", "avxvnni", "avx2", "neon", "reference"),
    )
    implementation: str = setting(
        "auto",
        "Model implementation: native, transformers (with paged attention), or auto (native where it exists).",
        choices=("auto", "native", "transformers"),
    )
    hash_bytes_per_s: int = setting(
        100 << 20,
        "Maximum bytes per second that are read after the start to hash the weights completely, once for each folder; "
        "0: never hash them.",
    )
    tokens_per_block: int = setting(16, "Number of tokens in one KV block; must be a multiple of the scheduler's.")
    max_attention_window: int = setting(
        0, "Maximum attention window in tokens; 0: the model's. Must equal the scheduler's."
    )
    layer_attention_windows: str = setting(
        "",
        "Maximum attention windows of the layers in tokens, separated by commas, repeated for all layers; each is at "
        "most max_attention_window, unless that is 0. Empty: one window for all layers.",
    )
    sink_token_length: int = setting(
        0, "Number of initial tokens that are always among max_attention_window; 0: none. Must equal the scheduler's."
    )
    free_memory_fraction: float = setting(
        0.9,
        "Fraction of the memory left after loading and warm-up that the KV pool gets on a GPU. On a CPU the pool "
        "gets a quarter of that, at most 4 GiB.",
    )
    max_kv_tokens: int = setting(0, "Maximum tokens in the KV pool; 0: limited only by the memory fraction.")
    shared_kv_folder: str = setting(
        "",
        "Folder in shared memory, accessible only to this user, for the KV pool of a CPU worker and for "
        "host_kv_bytes. If a CPU worker dies, other workers on the host reuse its blocks. Empty: the pool is lost "
        "with the process.",
    )
    host_kv_bytes: int = setting(
        0,
        "Maximum bytes in shared_kv_folder for full KV blocks, which are kept after their eviction and after the "
        "death of the worker; 0: none.",
    )
    disk_kv_folder: str = setting(
        "", "Folder on disk, accessible only to this user, that keeps full KV blocks; empty: none."
    )
    disk_kv_bytes: int = setting(16 << 30, "Maximum bytes of one model's blocks in disk_kv_folder.")
    disk_kv_bytes_per_s: int = setting(
        0, "Maximum bytes per second that the worker writes to disk_kv_folder; 0: no limit."
    )
    price_per_hour: float = setting(
        0.0, "Price of this worker's machine, or of its share of it, per hour in any currency, for metrics of cost."
    )
    notice_file: str = setting(
        "",
        "File whose existence announces that this machine will be taken away; the worker then leaves as after SIGTERM. "
        "Empty: none.",
    )
    notice_metadata: str = setting(
        "off",
        "Cloud whose metadata service announces that this machine will be taken away.",
        choices=("off", "aws", "gcp", "azure"),
    )
    notice_url: str = setting("", "URL of the metadata service, http://HOST[:PORT]; empty: the cloud's.")
    role: str = setting(
        "both",
        "prefill: compute prompts and hand requests over to decode workers; decode: generate for these requests; "
        "both: any request.",
        choices=("both", "prefill", "decode"),
    )
    kv_transfer_host: str = setting(
        "127.0.0.1", "Address of this machine at which decode workers fetch the KV blocks of a prefill worker."
    )
    kv_transfer_port: int = setting(0, "Port for kv_transfer_host; 0: any free one.")
    kv_transfer_bytes: int = setting(
        1 << 28,
        "Maximum bytes of KV blocks, fetched by a decode worker or read ahead from tiers, that are held for requests "
        "that have not started there.",
    )
    max_batch_size: int = setting(256, "Maximum number of sequences per step.")
    max_num_tokens: int = setting(0, "Maximum number of tokens per step; 0: 2048 on a GPU, 256 on a CPU.")
    max_sequence_length: int = setting(0, "Maximum number of tokens of prompt and output; 0: the model's limit.")
    lora_host_cache_bytes: int = setting(1 << 30, "Maximum bytes of adapters cached in host memory.")
    lora_device_cache_percent: float = setting(
        0.05, "Fraction, 0 to 1, of the memory left after weights and KV pool to use for the adapters on the device."
    )
    lora_num_host_module_layer: int = setting(
        0,
        "Size of the host adapter cache in ranks of one module in one layer, instead of lora_host_cache_bytes; 0: "
        "unused.",
    )
    lora_num_device_module_layer: int = setting(
        0,
        "Size of the device adapter cache in ranks of one module in one layer, instead of lora_device_cache_percent; "
        "0: unused.",
    )
    lora_max_adapter_size: int = setting(64, "Maximum adapter rank.")
    logits_post_processors: str = setting(
        "",
        "Additional logits post-processors: comma-separated NAME=module:Class, or NAME=unix:PATH for a function of the "
        "process that serves this socket.",
    )
    replicate_post_processors: bool = setting(
        False, "Call post-processors on all tensor ranks of a group's first stage; only rank 0's result is used."
    )
    update_root: str = setting(
        "",
        "Folder below which UpdateWeights may load weights, the same for routers and workers. Empty: only the served "
        "model's own folder.",
    )
    adapter_root: str = setting(
        "", "Folder that must contain all adapters, after resolving links; empty: the routers' setting."
    )
    cuda_graphs: bool = setting(True, "On a GPU, decode with CUDA graphs.")
    attention: str = setting(
        "auto",
        "Attention kernels on a GPU; auto: Triton, or an installed package if it is faster, as measured at start-up "
        "for each kind of step.",
        choices=("auto", "triton", "flash-attn", "flashinfer"),
    )
    run_ahead: str = setting(
        "auto",
        "Launch a step before the tokens of the previous step are known; auto: on a GPU. Must be the same on all "
        "ranks.",
        choices=("auto", "on", "off"),
    )
    batch_invariant: bool = setting(False, "On a GPU, make outputs independent of the rest of the batch; slower.")
    num_threads: int = setting(0, "Number of compute threads on a CPU; 0: one per core allowed by affinity and cgroup.")
    tensor_parallel: int = setting(0, "Number of tensor parallel ranks; 0: WORLD_SIZE divided by the pipeline stages.")
    pipeline_parallel: int = setting(1, "Pipeline stages.")
    expert_parallel: bool = setting(
        False, "Give each tensor parallel rank whole experts of a mixture instead of some features of each expert."
    )
    rank_timeout_s: float = setting(10.0, "Time without a message from a rank after which all ranks of its group exit.")
