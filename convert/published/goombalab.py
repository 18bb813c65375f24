"""goombalab's Phi-Mamba and Hybrid-Phi-Mamba (Bick et al. 2024), and students of their trainer, goombalab/mohawk.

A nested configuration lists runs of equal blocks, each with a mixer: DiscreteMamba2 or the teacher's attention. They
lie under backbone.*, a block's mixer under .mixer, attention under .mixer.self_attn. Phi's attention layers take their
sizes from transformers' PhiConfig defaults, whatever the configuration says; so do they here, unless a base model
is named.

Shapes: E inner width, H heads, G heads of B and C, N state.
"""

from typing import Any, NamedTuple

from transformers import PhiConfig, PreTrainedConfig

from ..parts import Fill, Part, Table, moved
from .base import Published, PublishedFormat, head_and_embedding, rotary_buffers

EMBEDDING = "backbone.embedding.weight"
BLOCKS = {"phiblock": "phimamba", "mambaphi": "phimamba", "llamablock": "llamba", "qwen2block": "llamba"}
MIXER = "discretemamba2"
ATTENTION = ("phiattention", "llamaattention", "qwen2attention")
PHI_CONTEXT, LLAMA_CONTEXT = 2048, 131072
NORM_EPS = 1e-5


class Layer(NamedTuple):
    """One block of the configuration, whichever of its spellings it came in."""

    block: str
    core: str
    block_input: dict[str, Any]
    core_input: dict[str, Any]


def components(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the model; a training configuration wraps it."""
    return config.get("ComponentsConfig", config)


def head_input(config: dict[str, Any]) -> dict[str, Any]:
    """What is said about vocabulary and head."""
    parts = components(config)
    return parts.get("LanguageModel", parts).get("input", {})


def model_input(config: dict[str, Any]) -> dict[str, Any]:
    """What is said about the whole model."""
    return components(config)["MixerModel"].get("input", {})


def layers(config: dict[str, Any]) -> list[Layer]:
    """Every layer in order.

    Raises:
        ValueError: a block or mixer that this project does not have, or a wrong number of layers.
    """
    parts = components(config)
    runs = parts["MixerModel"].get("Blocks") or [run for name, run in parts.items() if name.startswith("Block")]
    found = []
    for run in runs:
        inner = run.get("Layer", {})
        block = _plain(run.get("BlockType") or run.get("name") or run.get("type"))
        core = _plain(run.get("CoreType") or inner.get("name") or inner.get("type"))
        if block not in BLOCKS or core not in (MIXER, *ATTENTION):
            raise ValueError(
                f"The configuration has {core!r} mixers in {block!r} blocks; known are "
                f"{', '.join((MIXER, *ATTENTION))} in {', '.join(BLOCKS)}."
            )
        inputs = run.get("block_input") or run.get("input") or {}, run.get("core_input") or inner.get("input") or {}
        found += [Layer(block, core, *inputs)] * run["n_layers"]
    if not found or len(found) != model_input(config).get("n_layer", len(found)):
        raise ValueError(f"The configuration's blocks make {len(found)} layers; n_layer says otherwise.")
    return found


def _plain(name: str | None) -> str:
    return (name or "").rpartition(".")[2].replace("_", "").lower()


def student(source: Published) -> str:
    """Which of our families has its block.

    Raises:
        ValueError: blocks of both.
    """
    kinds = {BLOCKS[layer.block] for layer in layers(source.config)}
    if len(kinds) > 1:
        raise ValueError(f"{source.name} mixes Phi's blocks with Llama's; no family of ours holds both.")
    return kinds.pop()


def fields(source: Published) -> dict[str, Any]:
    """Fields of our configuration.

    Raises:
        ValueError: something that ours cannot hold.
    """
    found, kind = layers(source.config), student(source)
    rows, hidden = source.shape(EMBEDDING)
    mixers = [layer.core_input for layer in found if layer.core == MIXER]
    says_tied = bool(head_input(source.config).get("tie_embeddings", False))
    common = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": len(found),
        "layer_types": ["linear_attention" if layer.core == MIXER else "full_attention" for layer in found],
        "tie_word_embeddings": source.is_tied(EMBEDDING, says_tied),
        "lm_head_bias": "lm_head.bias" in source.tensors,
        **source.token_ids(),
    }
    block = _phi_block(source, found) if kind == "phimamba" else _llama_block(source, found)
    return common | mixer_fields(source, mixers, hidden) | block


def mixer_fields(source: Published, mixers: list[dict[str, Any]], hidden: int) -> dict[str, Any]:
    """The mixer's part, which Llamba has too.

    Raises:
        ValueError: layers that differ, or a norm or activation that ours does not have.
    """
    if not mixers:
        return {}
    said = mixers[0]
    sizes = ("d_state", "n_v_heads", "n_qk_heads", "d_conv", "expand", "d_inner", "activation", "bias", "conv_bias")
    if any(other.get(name) != said.get(name) for other in mixers for name in sizes):
        raise ValueError("The configuration's mixers differ from layer to layer; ours share one set of sizes.")
    if any(".mixer.norm." in name for name in source.tensors):
        raise ValueError("Its mixers have a norm before out_proj (norm_cls); ours of this kind have none.")
    activation = said.get("activation", "identity")
    activation = "identity" if activation in (None, "id", "linear", "none") else activation
    heads = said.get("n_v_heads", 32)
    return {
        "mixer": "discrete_mamba2",
        "mixer_num_heads": heads,
        "mixer_num_kv_heads": heads,  # B and C at fewer heads are repeated, see `mixer_table`
        "mixer_head_dim": (said.get("d_inner") or said.get("expand", 1) * hidden) // heads,
        "mixer_d_state": said.get("d_state", 64),
        "mixer_d_conv": said.get("d_conv", 4),
        "mixer_activation": "silu" if activation == "swish" else activation,
        "mixer_gate_bias": any(name.endswith(".mixer.z_bias") for name in source.tensors),
        "mixer_in_bias": bool(said.get("bias", False)),
        "mixer_out_bias": bool(said.get("bias", False)),
    }


def _phi_block(source: Published, found: list[Layer]) -> dict[str, Any]:
    phi = source.base or PhiConfig()
    if source.base is None and any(layer.core in ATTENTION for layer in found):
        source.notes.append("attention sizes are PhiConfig's defaults (Phi-1.5's), which is what the original reads")
    return {
        "intermediate_size": source.shape("backbone.layers.0.mlp.fc1.weight")[0],
        "hidden_act": "gelu_new",
        "layer_norm_eps": NORM_EPS,
        "num_attention_heads": phi.num_attention_heads,
        "num_key_value_heads": phi.num_key_value_heads or phi.num_attention_heads,
        "rope_parameters": dict(phi.rope_parameters),
        "max_position_embeddings": phi.max_position_embeddings,
    }


def _llama_block(source: Published, found: list[Layer]) -> dict[str, Any]:
    whole, base = model_input(source.config), source.base
    attention = next((layer.core_input for layer in found if layer.core in ATTENTION), {})
    eps = {layer.block_input.get("norm_epsilon", NORM_EPS) for layer in found} | {whole.get("norm_epsilon", NORM_EPS)}
    if len(eps) > 1:
        raise ValueError(f"The configuration has norms of different epsilon, {sorted(eps)}; ours share one.")
    said = attention | {name: value for name, value in whole.items() if name.startswith(("rope", "max_position"))}
    heads = said.get("num_attention_heads") or (base.num_attention_heads if base else 32)
    kv_heads = said.get("num_key_value_heads") or (base.num_key_value_heads if base else heads)
    if "rope_theta" in said:
        rope = {"rope_type": "default"} | dict(said.get("rope_scaling") or {}) | {"rope_theta": said["rope_theta"]}
    else:
        rope = dict(base.rope_parameters) if base else {"rope_type": "default", "rope_theta": 10000.0}
    qwen = any(layer.core == "qwen2attention" for layer in found)
    return {
        "intermediate_size": source.shape("backbone.layers.0.mlp.gate_proj.weight")[0],
        "hidden_act": found[0].block_input.get("mlp_act_fn", "silu"),
        "rms_norm_eps": eps.pop(),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": said.get("head_dim") or getattr(base, "head_dim", None),
        "rope_parameters": rope,
        "max_position_embeddings": said.get("max_position_embeddings")
        or (base.max_position_embeddings if base else LLAMA_CONTEXT),
        "attention_bias": qwen or bool(said.get("attention_bias", False)),
        "attention_out_bias": not qwen and bool(said.get("attention_bias", False)),
    }


def table(source: Published, config: PreTrainedConfig) -> tuple[Table, dict[str, str]]:
    """Our tensors from theirs."""
    rows, dropped = head_and_embedding(source, EMBEDDING, config)
    with_bias = ("weight", "bias") if config.model_type == "phimamba" else ("weight",)
    mlp = ("fc1", "fc2") if config.model_type == "phimamba" else ("gate_proj", "up_proj", "down_proj")
    norms = (
        ("input_layernorm",) if config.model_type == "phimamba" else ("input_layernorm", "post_attention_layernorm")
    )
    for kind in with_bias:
        rows[f"model.norm.{kind}"] = moved(f"backbone.final_layernorm.{kind}")
    for i, layer_type in enumerate(config.layer_types):
        ours, theirs = f"model.layers.{i}.", f"backbone.layers.{i}."
        for name in (*norms, *(f"mlp.{part}" for part in mlp)):
            rows |= {f"{ours}{name}.{kind}": moved(f"{theirs}{name}.{kind}") for kind in with_bias}
        if layer_type == "linear_attention":
            rows |= mixer_table(source, config, f"{ours}mixer.", f"{theirs}mixer.")
        else:
            rows |= _attention_table(config, f"{ours}self_attn.", f"{theirs}mixer.self_attn.")
    return rows, dropped | rotary_buffers(source)


def _attention_table(config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    out = "dense" if config.model_type == "phimamba" else "o_proj"
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": out}
    rows = {f"{ours}{mine}.weight": moved(f"{theirs}{name}.weight") for mine, name in names.items()}
    for mine, name in names.items():
        if config.attention_out_bias if mine == "o_proj" else config.attention_bias:
            rows[f"{ours}{mine}.bias"] = moved(f"{theirs}{name}.bias")
    return rows


def mixer_table(source: Published, config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    """A discrete Mamba-2 mixer: the layout is ours, but that B and C may have fewer heads, each shared by several."""
    heads, state, inner = config.mixer_num_heads, config.mixer_d_state, config.mixer_num_heads * config.mixer_head_dim
    groups = (source.shape(f"{theirs}conv1d.weight")[0] - inner) // (2 * state)
    times = heads // max(groups, 1)
    starts = [0, inner, inner + groups * state, inner + 2 * groups * state]

    def streams(name: str) -> tuple[Part, ...]:
        x, B, C = ((name, starts[k], starts[k + 1]) for k in range(3))
        return (Part(*x), Part(*B, block=state, times=times), Part(*C, block=state, times=times))

    rows = {f"{ours}{name}": moved(f"{theirs}{name}") for name in ("D", "out_proj.weight")}
    if config.mixer_gate_bias:
        rows[f"{ours}z_bias"] = moved(f"{theirs}z_bias")
    for name in ("conv1d.weight", "conv1d.bias"):
        rows[f"{ours}{name}"] = moved(f"{theirs}{name}") if times == 1 else streams(f"{theirs}{name}")
    if f"{theirs}conv1d.bias" not in source.tensors:
        rows[f"{ours}conv1d.bias"] = (Fill(inner + 2 * heads * state),)
    for kind in ("weight", "bias") if config.mixer_in_bias else ("weight",):
        name = f"{theirs}in_proj.{kind}"
        rows[f"{ours}in_proj.{kind}"] = moved(name) if times == 1 else (*streams(name), Part(name, starts[3]))
    if config.mixer_out_bias:
        rows[f"{ours}out_proj.bias"] = moved(f"{theirs}out_proj.bias")
    return rows


GOOMBALAB = PublishedFormat(
    name="goombalab Phi-Mamba / mohawk",
    sign="backbone.* tensors, a config.json with MixerModel",
    student=student,
    recognises=lambda source: EMBEDDING in source.tensors and "MixerModel" in components(source.config),
    fields=fields,
    table=table,
)
