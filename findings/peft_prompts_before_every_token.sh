#!/usr/bin/env bash
# peft 0.21.2 beside transformers 5.24.0: `generate` of a model with prompt tuning puts the learned prompt before every
# new token, not before the text alone.
#
# Seen: of a Llama of two layers and a prompt of 3 virtual tokens, the logits of the first new token equal those of the
# whole text in one pass; those of the second are off by more than .1. Beside transformers 5.23.0 all of them are equal.
# Why: transformers 5.24 calls the cache `cache` among the inputs of a step, and peft looks for `past_key_values` there
# to know that the prompt is in the cache already.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/generate.py" <<'PY'
import peft
import torch
import transformers

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
base = transformers.LlamaForCausalLM(config).eval()
settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
model = peft.get_peft_model(base, settings).eval()
ids = torch.arange(5, 15)[None]
made = model.generate(
    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False,
    return_dict_in_generate=True, output_logits=True,
)
errors = []
for step, logits in enumerate(made.logits):
    text = base.get_input_embeddings()(made.sequences[:, : 10 + step])
    with torch.no_grad():
        whole = base(inputs_embeds=torch.cat([model.get_prompt(1), text], 1)).logits[:, -1]
    errors.append((logits - whole).abs().max().item())
print("transformers", transformers.__version__, "peft", peft.__version__, "off by", [round(e, 4) for e in errors])
seen = [error > 0.1 for error in errors]
expected = [False, True, True] if transformers.__version__ == "5.24.0" else [False, False, False]
raise SystemExit(seen != expected)
PY
for version in 5.23.0 5.24.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet --disable-pip-version-check \
        torch==2.13.0 "transformers==$version" peft==0.21.2 accelerate==1.15.0
    "$folder/$version/bin/python" "$folder/generate.py"
done
