"""Tiny random encoders made with transformers, as model folders."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

SHAPE = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 1,
}
_DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
# Settings of each family, which differ from the defaults where a mistake would not be seen with these.
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "Camembert": {"type_vocab_size": 1},
    "DistilBert": {"vocab_size": 331, "max_position_embeddings": 96, "pad_token_id": 1, **_DISTILBERT},
    "Electra": {"embedding_size": 32},
    "MPNet": {"layer_norm_eps": 1e-5},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "ModernBert": {"local_attention": 8, "global_attn_every_n_layers": 3, "norm_eps": 1e-3},
    "NomicBert": {},
}
NO_TOKENS = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}


def make_encoder(folder: Path, family: str, num_labels: int | None = None, **settings: Any) -> Any:
    """Write a random encoder of `family`, with a classification head if there are labels, and return transformers'
    model.
    """
    torch.manual_seed(len(family))
    own = ENCODERS[family]
    shape = {} if family == "DistilBert" else SHAPE
    more = {} if num_labels is None else {"num_labels": num_labels}
    if family == "ModernBert":
        more |= NO_TOKENS
    config = getattr(transformers, f"{family}Config")(**{**shape, **own, **more, **settings})
    auto = transformers.AutoModel if num_labels is None else transformers.AutoModelForSequenceClassification
    model: Any = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial weights are larger than usual, so that any mistake is visible in the results.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
            if "norm" in name.lower():
                parameter.add_(1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({}))
    return model


def add_tokenizer(folder: Path, family: str) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer of letters with the family's way of joining texts to `folder`, and return transformers'."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = ["[NONE]", "[PAD]", "[CLS]", "[SEP]", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    made = tokenizers.Tokenizer(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if family in ("Roberta", "XLMRoberta"):
        made.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    else:
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (family in ("Bert", "Electra", "NomicBert"))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_input_names=inputs, model_max_length=SHAPE["max_position_embeddings"], **special
    )
    wrapped.save_pretrained(folder)
    return wrapped
