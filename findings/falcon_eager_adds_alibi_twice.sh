#!/bin/sh
# transformers' eager attention adds Falcon's ALiBi biases twice, so a model has other outputs than with its default.
#
# Guess before the run: the implementations of attention differ in rounding only.
# Seen with transformers 5.23.0: the largest difference of logits is above 0.01 for a model with ALiBi, and below 0.0001 for
# one with rotary embedding. The causal mask contains the biases already (FalconModel.forward), and the eager attention,
# unlike the one of PyTorch, adds them to the scores as well.
#
# Needs python3 and pip. Fails if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv new && new/bin/pip install -q torch==2.13.0 transformers==5.23.0 2> /dev/null
cat > compare.py <<'END'
import torch
import transformers


def difference(has_alibi):
    config = transformers.FalconConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=has_alibi, multi_query=False
    )
    torch.manual_seed(0)
    tokens, found = torch.arange(40)[None], []
    model = transformers.FalconForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    for name in ("eager", "sdpa"):
        other = transformers.FalconForCausalLM._from_config(config, attn_implementation=name).eval()
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            found.append(other(tokens).logits)
    return float((found[0] - found[1]).abs().max())


rotary, alibi = difference(False), difference(True)
print(f"largest difference: {rotary:.2g} with rotary embedding, {alibi:.2g} with ALiBi")
raise SystemExit(not (rotary < 1e-4 and alibi > 1e-2))
END
new/bin/python compare.py
