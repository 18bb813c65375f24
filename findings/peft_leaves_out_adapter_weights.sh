#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0: `PeftModel.from_pretrained` loads a LoRA of a deeper model into a shallower one and
# says nothing of the weights that it leaves out.
#
# Seen: of a Llama of 4 layers, 16 tensors are stored; into one of 2 layers 8 are loaded, with no warning of PEFT's and
# no error. The other way round, weights that the file lacks are named in a warning.
# Why one would guess otherwise: both are keys that do not match, and `load_state_dict` reports both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/load.py" <<'PY'
import sys
import warnings

import peft
import transformers


def llama(layers):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def loaded(made_of, into):
    folder = f"{sys.argv[1]}/{made_of}"
    settings = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(llama(made_of), settings).save_pretrained(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(llama(into), folder)
    stored = peft.utils.save_and_load.load_peft_weights(folder, device="cpu")
    words = [str(each.message) for each in said if "adapter" in str(each.message)]
    found = stored.keys() & peft.get_peft_model_state_dict(model).keys()
    print(f"{made_of} layers into {into}: stored {len(stored)}, loaded {len(found)}, warnings {len(words)}")
    return len(stored), len(found), len(words)


print("transformers", transformers.__version__, "peft", peft.__version__)
raise SystemExit([loaded(4, 2), loaded(2, 4)] != [(16, 8, 0), (8, 8, 1)])
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
"$folder/venv/bin/python" "$folder/load.py" "$folder"
