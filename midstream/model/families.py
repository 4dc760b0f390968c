"""The supported model families, and how each is served. Tests run all; `docs/models.md` is generated from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["CPU kernels", "PyTorch operations", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFamily:
    """A family and how it is served.

    Attributes:
        types: Values of `model_type` in config.json.
        on_cpu: The implementation used on a CPU: our kernels, our PyTorch decoder, or transformers.
        reads_gguf: Whether GGUF files are read as well as safetensors.
        takes_drafts: Whether requests may use speculative decoding.
        has_graphs: Whether decoding on a GPU is replayed from CUDA graphs.
        is_encoder: Whether the models generate no text, and each token attends to the whole text.
    """

    title: str
    types: tuple[str, ...]
    on_cpu: Way
    notes: str = ""
    reads_gguf: bool = False
    takes_drafts: bool = True
    has_graphs: bool = True
    is_encoder: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the family runs natively, with LoRA adapters and tensor parallelism."""
        return self.on_cpu != "transformers"

    @property
    def formats(self) -> str:
        return "safetensors, GGUF" if self.reads_gguf else "safetensors"


def _torch(title: str, *types: str, notes: str = "", has_graphs: bool = True, reads_gguf: bool = False) -> ServedFamily:
    return ServedFamily(
        title=title,
        types=types,
        on_cpu="PyTorch operations",
        notes=notes,
        reads_gguf=reads_gguf,
        has_graphs=has_graphs,
    )


def _recurrent(title: str, *types: str, notes: str, reads_gguf: bool = False) -> ServedFamily:
    return ServedFamily(
        title=title,
        types=types,
        on_cpu="PyTorch operations",
        notes=notes,
        reads_gguf=reads_gguf,
        takes_drafts=False,
        has_graphs=False,
    )


def _native(title: str, *types: str, notes: str = "", reads_gguf: bool = False) -> ServedFamily:
    return ServedFamily(title=title, types=types, on_cpu="CPU kernels", notes=notes, reads_gguf=reads_gguf)


def _other(title: str, *types: str) -> ServedFamily:
    return ServedFamily(title=title, types=types, on_cpu="transformers")


def _encoder(title: str, *types: str, notes: str = "", reads_gguf: bool = False) -> ServedFamily:
    return ServedFamily(
        title=title,
        types=types,
        on_cpu="transformers",
        notes=f"encoder, {notes}" if notes else "encoder",
        reads_gguf=reads_gguf,
        takes_drafts=False,
        has_graphs=False,
        is_encoder=True,
    )


_READS_IMAGES = "reads images; the language model is a Llama, Mistral, Qwen 2, Qwen 3 or Granite"

SERVED_FAMILIES = (
    _native("Llama", "llama", reads_gguf=True),
    _native("Llama 4 (text)", "llama4_text", "llama4", notes="experts, layers without rotary embedding, chunks"),
    _native("Qwen 2, Qwen 3", "qwen2", "qwen3", reads_gguf=True),
    _native("Qwen 2 MoE, Qwen 3 MoE", "qwen2_moe", "qwen3_moe", notes="experts", reads_gguf=True),
    _native("Mistral", "mistral", notes="windows; GGUF files of it are those of Llama"),
    _native("Ministral 8B", "ministral", notes="windows"),
    _native("Mixtral", "mixtral", notes="experts", reads_gguf=True),
    _native("Gemma", "gemma", reads_gguf=True),
    _native("Gemma 2", "gemma2", notes="windows, soft caps", reads_gguf=True),
    _native("Gemma 3", "gemma3_text", "gemma3", notes="windows, two rotary bases", reads_gguf=True),
    _native(
        "Phi-3, Phi-4", "phi3", notes="partial rotary embedding; LongRoPE up to the original length", reads_gguf=True
    ),
    _native("OLMo 2", "olmo2", notes="norms after layers", reads_gguf=True),
    _native("OLMo 3", "olmo3", notes="norms after layers, windows, two rotary scalings", reads_gguf=True),
    _native("OLMoE", "olmoe", notes="experts", reads_gguf=True),
    _native("FlexOlmo", "flex_olmo", notes="experts, norms after layers"),
    _native("Granite", "granite", notes="scaled embeddings, residuals and logits", reads_gguf=True),
    _native("Granite 3 MoE", "granitemoe", "granitemoeshared", notes="experts, scales as in Granite", reads_gguf=True),
    _native("GLM-4 (9B)", "glm", notes="partial rotary embedding"),
    _native("GLM-4 0414", "glm4", notes="partial rotary embedding", reads_gguf=True),
    _native("GLM-4.5", "glm4_moe", notes="experts, partial rotary embedding", reads_gguf=True),
    _native("gpt-oss", "gpt_oss", notes="experts, attention sinks, windows", reads_gguf=True),
    _torch(
        "DeepSeek-V3, Kimi K2",
        "deepseek_v3",
        "kimi_k2",
        notes="experts, latent cache",
        has_graphs=False,
        reads_gguf=True,
    ),
    _torch(
        "GLM-4.7 Flash",
        "glm4_moe_lite",
        notes="experts, latent cache; GGUF files of it are those of DeepSeek-V3",
        has_graphs=False,
    ),
    _native("SmolLM3", "smollm3", notes="layers without rotary embedding", reads_gguf=True),
    _native("Command R (Cohere)", "cohere", notes="parallel layers", reads_gguf=True),
    _native("Command R7B, A (Cohere 2)", "cohere2", notes="windows, parallel layers", reads_gguf=True),
    _native("MiniMax M2", "minimax_m2", notes="experts, partial rotary embedding"),
    _native("Seed-OSS", "seed_oss", reads_gguf=True),
    _native("Code World Model", "cwm", notes="windows"),
    _native("Helium", "helium"),
    _native("dots.llm1", "dots1", notes="experts, windows"),
    _native("EXAONE 4", "exaone4", notes="norms after layers, windows, layers without rotary embedding"),
    _native("K-EXAONE", "exaone_moe", notes="experts, windows, layers without rotary embedding"),
    _native("ERNIE 4.5", "ernie4_5", reads_gguf=True),
    _native("ERNIE 4.5 MoE", "ernie4_5_moe", notes="experts"),
    _native("Solar Open", "solar_open", notes="experts"),
    _native("Idefics 3, SmolVLM", "idefics3", "smolvlm", notes="reads images; the language model is a Llama"),
    _native("LLaVA 1.5, Pixtral", "llava", notes=_READS_IMAGES),
    _native("LLaVA-NeXT, Granite Vision", "llava_next", notes=_READS_IMAGES),
    _native("Mistral Small 3.1", "mistral3", notes=_READS_IMAGES),
    _native("InternVL", "internvl", notes=_READS_IMAGES),
    _recurrent("Qwen 3 Next", "qwen3_next", notes="gated delta nets, experts"),
    _recurrent(
        "Qwen 3.5", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", notes="gated delta nets, experts"
    ),
    _recurrent("Mamba", "mamba", notes="no attention"),
    _recurrent("Mamba 2", "mamba2", notes="no attention"),
    _recurrent("Nemotron-H", "nemotron_h", notes="Mamba 2 layers, experts"),
    _recurrent("Granite 4", "granitemoehybrid", notes="Mamba 2 layers, experts"),
    _recurrent("Bamba", "bamba", notes="Mamba 2 layers"),
    _recurrent("Falcon-H1", "falcon_h1", notes="Mamba 2 in parallel with attention"),
    _recurrent("LFM2", "lfm2", "lfm2_moe", notes="short convolutions, experts", reads_gguf=True),
    _torch("Arcee", "arcee", notes="feed-forward networks without gates", reads_gguf=True),
    _torch("Phi-1, Phi-2", "phi", notes="parallel layers, partial rotary embedding"),
    _torch("StarCoder 2", "starcoder2", notes="windows"),
    _torch("StableLM", "stablelm", notes="partial rotary embedding"),
    _torch("GPT-2", "gpt2", notes="learned positions"),
    _torch("OPT", "opt", notes="learned positions"),
    _torch("GPT-NeoX, Pythia", "gpt_neox", notes="parallel layers, partial rotary embedding"),
    _torch("Falcon", "falcon", notes="ALiBi or rotary embedding, parallel layers"),
    _torch("Bloom", "bloom", notes="ALiBi"),
    _torch("MPT", "mpt", notes="ALiBi"),
    _other("OLMo", "olmo"),
    _other("Gemma 3n (text)", "gemma3n_text"),
    _encoder("BERT", "bert", reads_gguf=True),
    _encoder("RoBERTa, XLM-RoBERTa, CamemBERT", "roberta", "xlm-roberta", "camembert"),
    _encoder("DistilBERT", "distilbert"),
    _encoder("ELECTRA", "electra"),
    _encoder("MPNet", "mpnet", notes="one text after another on GPUs, too"),
    _encoder("DeBERTa 2, DeBERTa 3", "deberta-v2", notes="one text after another on GPUs, too"),
    _encoder("ModernBERT", "modernbert", notes="local and global attention, two rotary bases"),
    _encoder("Nomic BERT", "nomic_bert", reads_gguf=True),
)
ENCODER_TYPES = frozenset(name for family in SERVED_FAMILIES if family.is_encoder for name in family.types)
HEADINGS = ("family", "model_type", "on a CPU", "weights", "LoRA", "tensor ranks", "drafts", "CUDA graphs", "notes")


def rows() -> list[tuple[str, ...]]:
    """Return a table row for each family, with the columns `HEADINGS`."""
    yes_or_no = ("no", "yes")
    return [
        (
            family.title,
            ", ".join(family.types),
            "transformers implementation" if family.on_cpu == "transformers" else family.on_cpu,
            family.formats,
            yes_or_no[family.is_own],
            yes_or_no[family.is_own],
            yes_or_no[family.takes_drafts],
            yes_or_no[family.has_graphs],
            family.notes,
        )
        for family in SERVED_FAMILIES
    ]
