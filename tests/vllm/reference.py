"""Tiny models and what transformers makes of them; runs in the project's environment, whose transformers is the newer.

python -m tests.vllm.reference make FOLDER          models, prompts, greedy tokens and their log-probabilities
python -m tests.vllm.reference score MODEL FILE     log-probabilities of the continuations in FILE, into FILE
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from convert import convert
from convert.formats.export import export_checkpoint
from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import LLAMA3_ROPE, TINY, VOCAB, YARN_ROPE
from tests.helpers.tiny_chat import chat_tokenizer
from tests.helpers.transfer import exporting

LENGTHS = (5, 37, 600, 70, 1, 130, 251, 3, 118, 122)
NEW_TOKENS = 24
# heads as vLLM's paged attention on a CPU wants them
SIZES = dict(
    hidden_size=64, intermediate_size=96, head_dim=32, mixer_head_dim=32, mixer_d_state=32,
    max_position_embeddings=1024, hybrid_window=24, hybrid_block=8, sliding_window=40, eos_token_id=2,
)  # fmt: skip
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CASES = {
    "hybrid": dict(pattern="beside", hybrid_window=[24, 0, 16, 0]),
    "no kept heads, llama3 RoPE": dict(
        pattern="beside-only", hybrid_window=[32, 16], hybrid_full_heads=None, rope_parameters=LLAMA3_ROPE
    ),
    "phi, heads kept apart": dict(
        family="phimamba", pattern="beside", num_key_value_heads=4, hybrid_full_heads=[[0, 1, 3], [], [2], []]
    ),
    "a layer without RoPE, another without a map": dict(
        pattern="beside", layer_rope=["none", "main", "main", "main"], hybrid_rank=[3, 0, 0, 0]
    ),
    "mamba2": dict(pattern="beside", mixer="mamba2"),
    "shared state": dict(pattern="shared"),
    "window alone": dict(
        pattern="beside-only", mixer="none", hybrid_window=[24, 16], mixer_decay_bias=False, hybrid_full_heads=None
    ),
    "mixers alone": dict(pattern="pure"),
    "phi, partial RoPE, key norms": dict(family="phimamba", qk_norm="layer", rope_parameters=HALF_ROTARY),
    "sliding window, biases, key norms, YaRN": dict(
        pattern="window", mixer="mamba2", attention_bias=True, qk_norm="rms", rope_parameters=YARN_ROPE
    ),
    "two kinds of RoPE, caps, far sinks": dict(pattern="gemma", hybrid_sink_reach=100, attn_logit_softcapping=2.0),
    "experts": dict(pattern="experts"),
    "mamba1": dict(mixer="mamba1"),
}
ROUNDED_CASES = {
    "attention in few bits": dict(pattern="beside", hybrid_window=[24, 0, 16, 0]),
    "few bits beside sliding windows": dict(pattern="gemma"),
    "attention in few bits alone": dict(pattern="attention", mixer="none", mixer_decay_bias=False),
}
"""Layers with full attention in eight bits: with kept heads and mixers, beside attention of vLLM's own, and alone."""
CONVERTED = "converted within a budget"
ROUNDED = "converted by default, in few bits"
HOLDABLE = dict(
    mixer="mamba2", mixer_norm="head", mixer_activation="silu", mixer_rotary=False, mixer_decay_bias=False,
    sliding_window=None, hybrid_full_heads=None,
)  # fmt: skip


def make(folder: Path) -> None:
    """One folder for each case and export, with `reference.json` in it."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(7, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    rounded = {name: dict(full_attention_bits=8, key_offsets=True) | ROUNDED_CASES[name] for name in ROUNDED_CASES}
    for name, options in (CASES | rounded).items():
        model = make_hybrid(dtype=torch.float32, **SIZES | options)
        model.save_pretrained(folder / name)
        chat_tokenizer().save_pretrained(folder / name)
        refer(model, folder / name, prompts)
    make_converted(folder, prompts)
    make_hybrid(dtype=torch.float32, **SIZES | HOLDABLE | {"hidden_size": 128}).save_pretrained(folder / "exportable")
    for to in ("granitemoehybrid", "bamba"):
        export_checkpoint(exporting(folder / "exportable", folder / to, to=to))
        chat_tokenizer().save_pretrained(folder / to)
        refer(AutoModelForCausalLM.from_pretrained(folder / to, dtype=torch.float32), folder / to, prompts)


def make_converted(folder: Path, prompts: list[list[int]]) -> None:
    """What the command makes of a teacher, told nothing but what suits one this small."""
    torch.manual_seed(0)
    sizes = TINY | {"hidden_size": 128, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1)).save_pretrained(folder / "teacher")
    chat_tokenizer().save_pretrained(folder / "teacher")
    for name, cache, bits in ((CONVERTED, 0.4, 16), (ROUNDED, 0.15, None)):
        convert(
            str(folder / "teacher"), str(folder / name), cache=cache, bits=bits, context=600, text="sampled",
            tokens=8192, alignment={"sequence_length": 512},
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        assert any(model.config.hybrid_full_heads)
        assert model.config.mixer != "none"
        assert (model.config.window_bits < 16) == (name == ROUNDED)
        refer(model, folder / name, prompts)


@torch.no_grad()
def refer(model: PreTrainedModel, folder: Path, prompts: list[list[int]]) -> None:
    """Write down the greedy continuation of each prompt."""
    found = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found.append(scored(model, prompt, ids[0, len(prompt) :].tolist()))
    (folder / "reference.json").write_text(json.dumps(found))


@torch.no_grad()
def scored(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> dict:
    """Tokens, and their log-probabilities in one pass over all of them."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": logits.log_softmax(-1)[range(len(tokens)), tokens].tolist(),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        model, file = sys.argv[2:]
        hybrid = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=True).eval()
        rows = json.loads(Path(file).read_text())
        Path(file).write_text(json.dumps([scored(hybrid, row["prompt"], row["tokens"]) for row in rows]))
