"""Small checkpoints in the published formats, and each published model written out in float64 from its equations.

The judges read the published tensors by their published names, one token at a time, and share no code with the models.
"""

import copy
import json

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

VOCAB, D, LAYERS, INTER = 96, 32, 4, 40
H, K, HEAD = 4, 2, 8
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "_name_or_path": "meta-llama/Llama-3.2-3B-Instruct",
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": LLAMA3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Tensors(dict):
    """Random tensors by name: `add("a.weight", 3, 4)`."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, mean: float = 0.0, scale: float | None = None) -> None:
        scale = (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) if scale is None else scale
        self[name] = mean + scale * torch.randn(shape, generator=self.generator)

    def norm(self, name: str, bias: bool = False) -> None:
        self.add(f"{name}.weight", D, mean=1.0, scale=0.2)
        if bias:
            self.add(f"{name}.bias", D)


def write(folder, config, tensors, binary=False, shards=1, mamba_config=None):
    """A folder as the original code leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if mamba_config is not None:
        (folder / "mamba_config.json").write_text(json.dumps(mamba_config))
    if binary:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
    else:
        names, weight_map = list(tensors), {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: tensors[n] for n in names[i::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[i::shards], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def discrete_tensors(t: Tensors, prefix: str, heads: int, groups: int, state: int, bias: bool = False) -> None:
    """A DiscreteMamba2 mixer: in_proj gives [x, B, C, z, A_log]."""
    channels = D + 2 * groups * state
    t.add(f"{prefix}in_proj.weight", channels + D + heads, D)
    t.add(f"{prefix}out_proj.weight", D, D)
    t.add(f"{prefix}conv1d.weight", channels, 1, 4, scale=0.5)
    t.add(f"{prefix}conv1d.bias", channels)
    t.add(f"{prefix}D", heads)
    if bias:
        t.add(f"{prefix}in_proj.bias", channels + D + heads)
        t.add(f"{prefix}out_proj.bias", D)
    else:
        t.add(f"{prefix}z_bias", D)


def phi_mamba(attention=(), mohawk: dict | None = None) -> tuple[dict, Tensors]:
    """Phi-Mamba, or Hybrid-Phi-Mamba with these attention layers; in mohawk's spelling with what those layers say."""
    t = Tensors(1)
    t.add("backbone.embedding.weight", VOCAB, D, scale=1.0)
    t.norm("backbone.final_layernorm", bias=True)
    t.add("lm_head.weight", VOCAB, D)
    t.add("lm_head.bias", VOCAB)
    core = {"d_state": 8, "n_v_heads": H, "n_qk_heads": H, "d_conv": 4, "conv_bias": True, "expand": 1,
            "chunk_size": 16, "activation": "identity", "bias": False}  # fmt: skip
    config = {"LanguageModel": {"input": {"vocab_size": VOCAB - 3, "pad_vocab_size_multiple": 8}}}
    config["MixerModel"] = {"input": {"d_model": D, "n_layer": LAYERS, "lm_head_prenorm": "layer"}}
    for i in range(LAYERS):
        prefix = f"backbone.layers.{i}."
        t.norm(f"{prefix}input_layernorm", bias=True)
        for name, shape in (("fc1", (4 * D, D)), ("fc2", (D, 4 * D))):
            t.add(f"{prefix}mlp.{name}.weight", *shape)
            t.add(f"{prefix}mlp.{name}.bias", shape[0])
        kind, inputs = "modules.mixers.discrete_mamba2", core
        if i in attention:
            kind, inputs = "modules.mixers.phi_attention", {"attn_type": "flash"}
            for name in ("q_proj", "k_proj", "v_proj", "dense"):
                t.add(f"{prefix}mixer.self_attn.{name}.weight", D, D)
                t.add(f"{prefix}mixer.self_attn.{name}.bias", D)
        else:
            discrete_tensors(t, f"{prefix}mixer.", H, H, 8)
        if mohawk is None:
            block = {"BlockType": "modules.phi_block", "CoreType": kind, "block_input": {}, "core_input": inputs}
        else:
            name, inputs = ("PhiAttention", mohawk) if i in attention else ("DiscreteMamba2", core)
            block = {"type": "MambaPhi", "input": {}, "Layer": {"type": name, "input": dict(inputs)}}
        config[f"Block{i + 1}"] = {"n_layers": 1} | block
    return config, t


def llama_backbone(t: Tensors, prefix: str) -> None:
    t.norm(f"{prefix}input_layernorm")
    t.norm(f"{prefix}post_attention_layernorm")
    t.add(f"{prefix}mlp.gate_proj.weight", INTER, D)
    t.add(f"{prefix}mlp.up_proj.weight", INTER, D)
    t.add(f"{prefix}mlp.down_proj.weight", D, INTER)


def mohawk(attention=(2,), qwen: bool = False, groups: int = 2) -> tuple[dict, Tensors]:
    """A student of goombalab/mohawk: B and C at fewer heads, biases, tied, Llama's or Qwen2's attention."""
    t = Tensors(2)
    t.add("backbone.embedding.weight", VOCAB, D, scale=1.0)
    t.norm("backbone.final_layernorm")
    name, rope = "Llama", {"rope_theta": 5e5, "rope_scaling": dict(LLAMA3)}
    if qwen:
        name, rope = "Qwen2", {"rope_theta": 1e6}
    ssm = {"d_state": 8, "n_qk_heads": groups, "n_v_heads": H, "expand": 1, "activation": "identity", "bias": True,
           "norm_cls": "none", "initializer": {"z": "default"}}  # fmt: skip
    heads = {"num_attention_heads": H, "num_key_value_heads": K, "max_position_embeddings": 256}
    blocks = []
    for i in range(LAYERS):
        prefix = f"backbone.layers.{i}."
        llama_backbone(t, prefix)
        if i in attention:
            for p, rows in (("q", D), ("k", K * HEAD), ("v", K * HEAD), ("o", D)):
                t.add(f"{prefix}mixer.self_attn.{p}_proj.weight", rows, D)
                if qwen and p != "o":
                    t.add(f"{prefix}mixer.self_attn.{p}_proj.bias", rows)
        else:
            discrete_tensors(t, f"{prefix}mixer.", H, groups, 8, bias=True)
        layer = {"name": f"{name}Attention", "input": heads | rope} if i in attention else {
            "name": "DiscreteMamba2", "input": dict(ssm)}  # fmt: skip
        mlp = {"mlp_intermediate_size": INTER, "mlp_act_fn": "silu", "norm_epsilon": 1e-5}
        blocks.append({"name": f"{name}Block", "n_layers": 1, "Layer": layer, "input": mlp})
    model = {"d_model": D, "n_layer": LAYERS, "norm_epsilon": 1e-5, "max_position_embeddings": 256, "head_dim": HEAD}
    model |= rope
    config = {"name": "LayeredMambaLM", "input": {"vocab_size": VOCAB, "tie_embeddings": True},
              "MixerModel": {"name": f"{name}Model", "input": model, "Blocks": blocks}}  # fmt: skip
    return config, t


def llamba(tied: bool) -> tuple[dict, Tensors]:
    """Cartesia's Llamba."""
    t = Tensors(3)
    t.add("backbone.embedding.weight", VOCAB, D, scale=1.0)
    t.norm("backbone.final_layernorm")
    for i in range(LAYERS):
        llama_backbone(t, f"backbone.layers.{i}.")
        discrete_tensors(t, f"backbone.layers.{i}.mixer.", H, H, 8)
    if not tied:
        t.add("lm_head.weight", VOCAB, D)
    config = {"model_type": "llamba", "vocab_size": VOCAB, "tie_embeddings": tied, "pad_vocab_size_multiple": 8,
              "lm_head_bias": False, "d_model": D, "n_layer": LAYERS, "resid_dropout": 0.0, "norm_epsilon": 1e-5,
              "mlp_cfg": {"intermediate_size": INTER, "bias": False, "act_fn": "silu"},
              "ssm_cfg": {"d_state": 8, "n_v_heads": H, "n_qk_heads": H, "expand": 1, "chunk_size": 16,
                          "activation": "identity", "bias": False}}  # fmt: skip
    return config, t


def mamba_in_llama(version: int, m1: bool = False, attention=(1, 3), state: int = 4, early: bool | None = None):
    """v1, v2 or M1; `early` repeats x and B before the convolution (the default of v1, not of v2)."""
    t, xb = Tensors(4), K * HEAD
    early = version == 1 if early is None else early
    t.add("model.embed_tokens.weight", VOCAB, D, scale=1.0)
    t.norm("model.norm")
    t.add("lm_head.weight", VOCAB, D)
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        llama_backbone(t, prefix)
        if i in attention and m1:
            t.add(f"{prefix}mha.in_proj.weight", D + 2 * xb, D)
            t.add(f"{prefix}mha.out_proj.weight", D, D)
        elif i in attention:
            for p, rows in (("q", D), ("k", xb), ("v", xb), ("o", D)):
                t.add(f"{prefix}self_attn.{p}_proj.weight", rows, D)
        else:
            (_mamba2_tensors if version == 2 else _mamba1_tensors)(t, f"{prefix}mamba.", m1, xb, state, early)
    ssm = {"expand": 1, "ngroups": H, "d_state": HEAD} if version == 2 else {"expand": 1}
    mamba_config = {"d_model": D, "ssm_cfg": ssm, "rms_norm_eps": 1e-6, "vocab_size": None, "d_inner": None,
                    "d_xb": xb, "intermediate_size": INTER, "hidden_act": "silu", "n_layer": LAYERS,
                    "attn_layers": list(attention)}  # fmt: skip
    return copy.deepcopy(LLAMA), t, mamba_config


def _mamba2_tensors(t, prefix, m1, xb, state, early):
    channels = 3 * D if early else D + 2 * xb
    t.add(f"{prefix}dt_bias", H, mean=-1.0)
    t.add(f"{prefix}A_log", H, mean=-1.0)
    t.add(f"{prefix}D", H)
    t.add(f"{prefix}in_proj.weight", 2 * D + 2 * xb + H, D)
    t.add(f"{prefix}conv1d.weight", channels, 1, 4, scale=0.5)
    t.add(f"{prefix}conv1d.bias", channels)
    t.add(f"{prefix}norm.weight", D, mean=1.0)
    t.add(f"{prefix}out_proj.weight", D, D)


def _mamba1_tensors(t, prefix, m1, xb, state, early):
    rank, channels = 2, D if early else xb
    parts = {"in_proj_z": D, "in_proj_x": xb, "B_proj": xb, "C_proj": D, "dt_proj_down": rank}
    t.add(f"{prefix}A_log", D, state, mean=-1.0, scale=0.5)
    t.add(f"{prefix}D", D)
    if m1:
        t.add(f"{prefix}in_proj.weight", sum(parts.values()), D)
    else:
        for name, rows in parts.items():
            t.add(f"{prefix}{name}.weight", rows, D)
    t.add(f"{prefix}dt_proj.weight", D, rank)
    t.add(f"{prefix}dt_proj.bias", D, mean=-1.0)
    t.add(f"{prefix}conv1d.weight", channels, 1, 4, scale=0.5)
    t.add(f"{prefix}conv1d.bias", channels)
    t.add(f"{prefix}out_proj.weight", D, D)


# -- judges: x, u (B, L, D); w the published tensors in float64


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def convolve(w, name, x):
    """Each channel with its own taps, the last tap for the current token."""
    out = torch.zeros_like(x)
    taps = w[f"{name}.weight"].shape[-1]
    for t in range(x.shape[1]):
        for k in range(taps):
            if t - k >= 0:
                out[:, t] += x[:, t - k] * w[f"{name}.weight"][:, 0, taps - 1 - k]
    return out + w[f"{name}.bias"]


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def state_space(x, decay, inject, B, C):
    """S <- decay S + inject x B^T, y = S C. x (B, L, H, P), decay and inject (B, L, H), B and C (B, L, H, N)."""
    S, ys = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3]), []
    for t in range(x.shape[1]):
        outer = x[:, t, :, :, None] * B[:, t, :, None, :]
        S = decay[:, t, :, None, None] * S + inject[:, t, :, None, None] * outer
        ys.append((S * C[:, t, :, None, :]).sum(-1))
    return torch.stack(ys, 1)


def discrete_mamba2(w, prefix, u, heads, groups, state, silu=False):
    projected = linear(w, f"{prefix}in_proj", u)
    n = groups * state
    xBC, z, A_log = projected.split([D + 2 * n, D, heads], dim=-1)
    xBC = convolve(w, f"{prefix}conv1d", xBC)
    x, B, C = (F.silu(xBC) if silu else xBC).split([D, n, n], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    # head h reads B and C of head h // (heads / groups)
    owner = [h * groups // heads for h in range(heads)]
    B, C = (v.unflatten(-1, (groups, state))[:, :, owner] for v in (B, C))
    decay = torch.exp(-torch.log1p(torch.exp(A_log)))
    y = state_space(x, decay, torch.ones_like(decay), B, C) + w[f"{prefix}D"][:, None] * x
    z = z + w[f"{prefix}z_bias"] if f"{prefix}z_bias" in w else z
    return linear(w, f"{prefix}out_proj", y.flatten(2) * z * torch.sigmoid(z))


def mamba2(w, prefix, u, early):
    xb = K * HEAD
    z, x, B, C, dt = linear(w, f"{prefix}in_proj", u).split([D, xb, xb, D, H], dim=-1)
    owner = [h * K // H for h in range(H)]

    def widen(v):
        return v.unflatten(-1, (K, HEAD))[:, :, owner].flatten(2)

    x, B = (widen(x), widen(B)) if early else (x, B)
    xBC = F.silu(convolve(w, f"{prefix}conv1d", torch.cat([x, B, C], -1)))
    x, B, C = xBC.split([x.shape[-1], B.shape[-1], D], dim=-1)
    x, B = (x, B) if early else (widen(x), widen(B))
    x, B, C = (v.unflatten(-1, (H, HEAD)) for v in (x, B, C))
    dt = torch.log1p(torch.exp(dt + w[f"{prefix}dt_bias"]))
    y = state_space(x, torch.exp(-torch.exp(w[f"{prefix}A_log"]) * dt), dt, B, C) + w[f"{prefix}D"][:, None] * x
    gated = y.flatten(2) * F.silu(z)
    # one norm per head; its epsilon is 1e-5, not the model's
    normed = rms(gated.unflatten(-1, (H, HEAD)), 1.0, 1e-5).flatten(2) * w[f"{prefix}norm.weight"]
    return linear(w, f"{prefix}out_proj", normed)


def mamba1(w, prefix, u, state, early):
    xb = K * HEAD
    if f"{prefix}in_proj.weight" in w:
        rank = w[f"{prefix}dt_proj.weight"].shape[1]
        z, x, B, C, dt = linear(w, f"{prefix}in_proj", u).split([D, xb, xb, D, rank], dim=-1)
    else:
        z, x, B, C, dt = (linear(w, f"{prefix}{p}", u) for p in
                          ("in_proj_z", "in_proj_x", "B_proj", "C_proj", "dt_proj_down"))  # fmt: skip
    dt = linear(w, f"{prefix}dt_proj", dt) + w[f"{prefix}dt_proj.bias"]  # the bias a second time
    dt = torch.log1p(torch.exp(dt))
    times = D // xb

    def widen(v):  # runs of `state` channels, whatever the head dimension
        return v.unflatten(-1, (xb // state, state)).repeat_interleave(times, dim=2)

    x = widen(x).flatten(2) if early else x
    x = F.silu(convolve(w, f"{prefix}conv1d", x))
    x = x if early else widen(x).flatten(2)
    B, C = widen(B), C.unflatten(-1, (D // state, state))
    A, S, ys = -torch.exp(w[f"{prefix}A_log"]), u.new_zeros(u.shape[0], D, state), []
    for t in range(u.shape[1]):
        b, c = (v[:, t].repeat_interleave(state, dim=1) for v in (B, C))  # each run's B and C for its channels
        S = torch.exp(dt[:, t, :, None] * A) * S + (dt[:, t] * x[:, t])[..., None] * b
        ys.append((S * c).sum(-1))
    y = torch.stack(ys, 1) + w[f"{prefix}D"] * x
    return linear(w, f"{prefix}out_proj", y * F.silu(z))


def frequencies(dim, theta, scaling=None):
    """RoPE's angular frequencies; `scaling` is Llama 3's."""
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return freq
    waves = 2 * torch.pi / freq * scaling["low_freq_factor"] / scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # waves longer than the old context / low are stretched, shorter than / high are not, blended between
    blend = ((low / waves) - low) / (high - low)
    return freq * (blend.clamp(0, 1) + (1 - blend.clamp(0, 1)) / scaling["factor"])


def rotate(x, freq):
    """(B, L, H, d): the first 2 len(freq) features in halves."""
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * freq
    n = len(freq)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(q, k, v, freq, window=None):
    """q (B, L, H, d), k and v (B, L, K, d): softmax attention; head h reads key/value head h // (H / K)."""
    q, k = rotate(q, freq), rotate(k, freq)
    owner = [h * k.shape[2] // q.shape[2] for h in range(q.shape[2])]
    scores = torch.einsum("blhd,bshd->bhls", q, k[:, :, owner]) * q.shape[-1] ** -0.5
    offset = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = (offset < 0) | (offset >= (window or q.shape[1]))
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshd->blhd", probabilities, v[:, :, owner]).flatten(2)


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def phi_logits(w, ids, attention_layers, heads=32, theta=1e4, rotated=0.5):
    w = {name: tensor.double() for name, tensor in w.items()}
    h = w["backbone.embedding.weight"][ids]
    for i in range(LAYERS):
        p = f"backbone.layers.{i}."
        u = F.layer_norm(h, (D,), w[f"{p}input_layernorm.weight"], w[f"{p}input_layernorm.bias"], 1e-5)
        if i in attention_layers:
            q, k, v = (linear(w, f"{p}mixer.self_attn.{n}_proj", u).unflatten(-1, (heads, -1)) for n in "qkv")
            mixed = attention(q, k, v, frequencies(int(D // heads * rotated), theta))
            mixed = linear(w, f"{p}mixer.self_attn.dense", mixed)
        else:
            mixed = discrete_mamba2(w, f"{p}mixer.", u, H, H, 8)
        h = h + mixed + linear(w, f"{p}mlp.fc2", gelu_new(linear(w, f"{p}mlp.fc1", u)))
    h = F.layer_norm(h, (D,), w["backbone.final_layernorm.weight"], w["backbone.final_layernorm.bias"], 1e-5)
    return linear(w, "lm_head", h)


def llama_logits(w, ids, mixer, eps, embedding, layers, norm):
    """Llama's block; `mixer(w, layer, u)` gives attention's or the state space model's output."""
    w = {name: tensor.double() for name, tensor in w.items()}
    h = w[embedding][ids]
    for i in range(LAYERS):
        p = f"{layers}.{i}."
        h = h + mixer(w, i, rms(h, w[f"{p}input_layernorm.weight"], eps))
        u = rms(h, w[f"{p}post_attention_layernorm.weight"], eps)
        gate, up = linear(w, f"{p}mlp.gate_proj", u), linear(w, f"{p}mlp.up_proj", u)
        h = h + linear(w, f"{p}mlp.down_proj", F.silu(gate) * up)
    return rms(h, w[norm], eps) @ w.get("lm_head.weight", w[embedding]).T


FORMATS = {
    "phi-mamba": lambda: (*phi_mamba((1,)), None),
    "mohawk": lambda: (*mohawk(), None),
    "mohawk, Phi": lambda: (*phi_mamba((1,), mohawk={"num_attention_heads": H}), None),
    "llamba": lambda: (*llamba(True), None),
    "v1": lambda: mamba_in_llama(1),
    "v2": lambda: mamba_in_llama(2),
    "m1": lambda: mamba_in_llama(1, m1=True),
}
"""Every format: configuration and weights of the checkpoint, and the base where it needs one."""
