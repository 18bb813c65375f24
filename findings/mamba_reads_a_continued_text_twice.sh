#!/usr/bin/env bash
# transformers 5.24.0 (5.23.0 alike): `generate` with a returned cache and the whole text, as a Llama takes it, makes a
# Mamba read the tokens again that its cache holds already. It takes the new tokens alone.
#
# Seen: of a Llama both ways give the logits of one long generation. Of a Mamba the new tokens alone do; with the whole
# text the next logits are off by about 1, and nothing is said.
# Why: `generate` cuts the tokens that a cache has counted, and a cache of states alone counts none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/generate.py" <<'PY'
import copy

import torch
import transformers

sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
heads = dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
configs = {"llama": transformers.LlamaConfig(**sizes, **heads), "mamba": transformers.MambaConfig(**sizes)}
ids = torch.arange(5, 15)[None]
options = dict(do_sample=False, return_dict_in_generate=True, output_logits=True)
wrong = {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    expected = model.generate(ids, max_new_tokens=8, **options).logits[4]
    first = model.generate(ids, max_new_tokens=4, **options)
    for given, text in {"new": first.sequences[:, -1:], "all": first.sequences}.items():
        mask = torch.ones_like(first.sequences if name == "llama" else text)
        again = model.generate(text, max_new_tokens=4, attention_mask=mask, cache=copy.deepcopy(first.cache), **options)
        wrong[name, given] = (again.logits[0] - expected).abs().max().item()
print("transformers", transformers.__version__, {key: round(error, 4) for key, error in wrong.items()})
seen = {key for key, error in wrong.items() if error > 0.1}
raise SystemExit(seen != {("mamba", "all")})
PY
python3 -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
"$folder/environment/bin/python" "$folder/generate.py"
