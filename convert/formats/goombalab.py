"""goombalab's Phi-Mamba and Hybrid-Phi-Mamba (Bick et al. 2024), and students of their trainer, goombalab/mohawk.

A nested configuration lists runs of equal blocks, each with a mixer: DiscreteMamba2 or the teacher's attention. They
lie under backbone.*, a block's mixer under .mixer, attention under .mixer.self_attn. Phi-Mamba's attention layers take
their sizes from transformers' PhiConfig defaults, whatever the configuration says; so do they here, unless a base
model is named. Those of mohawk take what their layer says.

Shapes: H heads, G groups, N state.
"""

from typing import Any, NamedTuple

from transformers import LlamaConfig, PhiConfig, PreTrainedConfig, Qwen2Config

from ..io.rules import Fill, Part
from .base import ANY, ForeignCheckpoint, Format, Section, head_and_embedding, rotary_buffers
from .table import Table, renamed

EMBEDDING = "backbone.embedding.weight"
BLOCKS = {"phiblock": "phimamba", "mambaphi": "phimamba", "llamablock": "llamba", "qwen2block": "llamba"}
MIXER = "discretemamba2"
ATTENTION = ("phiattention", "llamaattention", "qwen2attention")
MIXER_SIZES = (
    "d_state", "n_v_heads", "n_qk_heads", "nheads", "d_conv", "expand", "d_inner", "activation", "bias", "conv_bias",
)  # fmt: skip
MIXER_HARMLESS = dict.fromkeys(("chunk_size", "initializer", "layer_idx", "device", "dtype"), ANY) | {
    "norm_cls": "none", "use_ref_impl": False,
}  # fmt: skip
BLOCK_HARMLESS = dict.fromkeys(("resid_dropout", "layer_idx"), ANY) | {"mlp_bias": False, "mlp_type": "default"}
ATTENTION_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias")
ATTENTION_HARMLESS = dict.fromkeys(
    ("attn_type", "attn_implementation", "_attn_implementation", "layer_idx", "attention_dropout", "hidden_size",
     "use_cache"), ANY,
) | {"qk_layernorm": False, "sliding_window": None}  # fmt: skip
ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings")
ATTENTION_INPUT = (*ATTENTION_SIZES, *ROTARY)
MODEL_HARMLESS = dict.fromkeys(("hidden_size", "vocab_size", "resid_dropout", "hidden_act", "pad_token_id"), ANY) | {
    "lm_head_prenorm": ANY,
}  # fmt: skip
HEAD_HARMLESS = dict.fromkeys(("vocab_size", "pad_vocab_size_multiple", "d_model", "initializer_cfg"), ANY)
NORM_EPS = 1e-5


class Layer(NamedTuple):
    """One block of the configuration, whichever of its spellings it came in."""

    block: str
    core: str
    block_input: Section
    core_input: Section
    is_mohawk: bool
    """Spelled as goombalab/mohawk spells it; its classes have other defaults than Phi-Mamba's."""


def components(source: ForeignCheckpoint) -> Section:
    """The part of the configuration that describes the model; a training configuration wraps it."""
    whole = source.section
    if "ComponentsConfig" in whole.values:
        return whole.need_section("ComponentsConfig")
    return whole


def head_input(source: ForeignCheckpoint) -> Section:
    """The settings of the vocabulary and the head."""
    parts = components(source)
    if "LanguageModel" in parts.values:
        parts = parts.section("LanguageModel")
    return parts.section("input")


def model_input(source: ForeignCheckpoint) -> Section:
    """The settings of the whole model."""
    return components(source).need_section("MixerModel").section("input")


def layers(source: ForeignCheckpoint) -> list[Layer]:
    """Every layer in order; a block or mixer that this project does not have is a ValueError."""
    parts = components(source)
    runs = parts.need_section("MixerModel").sections("Blocks") or [
        parts.need_section(name) for name in parts.values if name.startswith("Block")
    ]
    source.depth(sum(run.need("n_layers", int) for run in runs))
    found = [layer for run in runs for layer in [_layer(run)] * run.need("n_layers", int)]
    if not found or len(found) != model_input(source).get("n_layer", int, len(found)):
        raise ValueError(f"{parts.file}: its blocks make {len(found)} layers; n_layer says otherwise.")
    return found


def _layer(run: Section) -> Layer:
    inner = run.section("Layer")
    where = f"{run.file}: {run.path.removesuffix('.')}"
    block = run.get("BlockType", str) or run.get("name", str) or run.get("type", str, "")
    core = run.get("CoreType", str) or inner.get("name", str) or inner.get("type", str, "")
    block = block.rpartition(".")[2]
    core = core.rpartition(".")[2]
    known = f"known are {', '.join((MIXER, *ATTENTION))} in {', '.join(BLOCKS)}"
    if "ssm_layer" in run.values or "attn_layer" in run.values:
        raise ValueError(f"{where} is a {block}, with a mixer and attention side by side in a layer; {known}.")
    if _plain(block) not in BLOCKS or _plain(core) not in (MIXER, *ATTENTION):
        raise ValueError(f"{where} has {core or 'unnamed'} mixers in {block or 'unnamed'} blocks; {known}.")
    block_input = run.section("input")
    if run.values.get("block_input"):
        block_input = run.section("block_input")
    if run.values.get("core_input"):
        core_input = run.section("core_input")
    else:
        core_input = inner.section("input")
    block_input.only(("mlp_intermediate_size", "mlp_act_fn", "norm_epsilon"), BLOCK_HARMLESS)
    if _plain(core) == MIXER:
        core_input.only(MIXER_SIZES, MIXER_HARMLESS)
    else:
        core_input.only(ATTENTION_INPUT, ATTENTION_HARMLESS)
    return Layer(_plain(block), _plain(core), block_input, core_input, "BlockType" not in run.values)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def hybrid_of(source: ForeignCheckpoint) -> str:
    """The class of hybrid that has its blocks; a mixture of both classes' blocks is a ValueError."""
    kinds = {BLOCKS[layer.block] for layer in layers(source)}
    if len(kinds) > 1:
        raise ValueError(f"{source.name} mixes Phi's blocks with Llama's; no family of ours holds both.")
    return kinds.pop()


def fields(source: ForeignCheckpoint) -> dict[str, Any]:
    """Fields of the hybrid's configuration; what it cannot hold is a ValueError."""
    found = layers(source)
    kind = hybrid_of(source)
    rows, hidden = source.shape(EMBEDDING, 2)
    mixers = [layer for layer in found if layer.core == MIXER]
    model_input(source).only(("d_model", "n_layer", "norm_epsilon", "head_dim", *ROTARY), MODEL_HARMLESS)
    head_input(source).only(("tie_embeddings", "lm_head_bias"), HEAD_HARMLESS)
    says_tied = head_input(source).get("tie_embeddings", bool, False)
    common = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": len(found),
        "layer_types": ["linear_attention" if layer.core == MIXER else "full_attention" for layer in found],
        "tie_word_embeddings": source.is_tied(EMBEDDING, says_tied),
        "lm_head_bias": "lm_head.bias" in source.tensors,
        **source.token_ids(),
    }
    if mixers:
        said = _agreed([layer.core_input for layer in mixers], MIXER_SIZES, "mixers")
        common |= mixer_fields(source, said, hidden, mixers[0].is_mohawk)
    if kind == "phimamba":
        return common | _phi_block(source, found)
    return common | _llama_block(source, found)


def _agreed(inputs: list[Section], names: tuple[str, ...], what: str) -> Section:
    """The settings that all layers share; a ValueError where one of `names` differs from layer to layer."""
    first = inputs[0]
    for name in names:
        if any(other.values.get(name) != first.values.get(name) for other in inputs):
            raise ValueError(f"{first.file}: {name} of the {what} differs from layer to layer; ours share one.")
    return first


def mixer_fields(source: ForeignCheckpoint, said: Section, hidden: int, is_mohawk: bool) -> dict[str, Any]:
    """The fields of a discrete Mamba-2 mixer, which Llamba has too; a norm before out_proj is a ValueError."""
    if any(".mixer.norm." in name for name in source.tensors):
        raise ValueError("Its mixers have a norm before out_proj (norm_cls); ours of this kind have none.")
    said.only(MIXER_SIZES, MIXER_HARMLESS)
    # the class of the first commit counted heads in nheads, and had another default than the released one
    activation = "identity"
    other = "silu"
    if is_mohawk or "nheads" in said.values:
        activation = "silu"
        other = "identity"
    if "activation" in said.values:
        activation = said.get("activation", str, "identity")
    elif not is_mohawk:
        source.note(
            f"activation is not said: {activation}, as the class has it; with other code of its authors it was "
            f"trained with {other} (--set mixer_activation={other})",
            "mixer_activation",
        )
    aliases = {"id": "identity", "linear": "identity", "none": "identity", "swish": "silu"}
    prefix = next((name for name in source.tensors if name.endswith(".mixer.D")), None)
    if prefix is None:
        raise ValueError(f"{source.name} has no tensor that ends in .mixer.D, so it is incomplete.")
    prefix = prefix.removesuffix("D")
    (heads,) = source.shape(f"{prefix}D", 1)
    if said.get("n_v_heads", int, heads) != heads:
        raise ValueError(
            f"{said.file}: {said.path}n_v_heads is {said.values['n_v_heads']}, but tensors have {heads} heads."
        )
    # mohawk's class has no expand, the other two no d_inner
    if is_mohawk:
        inner = said.get("d_inner", int, hidden)
    else:
        inner = said.get("expand", int, 1) * hidden
    said.get("bias", bool)  # the tensors say which of the two projections have one
    return {
        "mixer": "discrete_mamba2",
        "mixer_num_heads": heads,
        "mixer_num_kv_heads": heads,  # B and C at fewer heads are repeated, see `mixer_table`
        "mixer_head_dim": inner // heads,
        "mixer_d_state": said.get("d_state", int, 64),
        "mixer_d_conv": said.get("d_conv", int, 4),
        "mixer_activation": aliases.get(activation, activation),
        "mixer_gate_bias": any(name.endswith(".mixer.z_bias") for name in source.tensors),
        "mixer_in_bias": f"{prefix}in_proj.bias" in source.tensors,
        "mixer_out_bias": f"{prefix}out_proj.bias" in source.tensors,
    }


def rope_parameters(said: Section, default: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling as the `rope_parameters` of transformers 5."""
    rope = dict(default)
    scaling = said.section("rope_scaling")
    if scaling.values:
        kind = scaling.get("rope_type", str) or scaling.get("type", str, "default")
        rope |= {name: value for name, value in scaling.values.items() if name != "type"} | {"rope_type": kind}
    for name in ("rope_theta", "partial_rotary_factor"):
        value = said.get(name, float)
        if value is not None:
            rope[name] = value
    return rope


def _phi_block(source: ForeignCheckpoint, found: list[Layer]) -> dict[str, Any]:
    phi = source.base or PhiConfig()
    said = Section({}, "")
    attention = [layer for layer in found if layer.core in ATTENTION]
    if attention and attention[0].is_mohawk:
        said = _agreed([layer.core_input for layer in attention], (*ATTENTION_SIZES[:2], *ROTARY), "attention layers")
    elif attention and source.base is None:
        text = "attention sizes are PhiConfig's defaults (Phi-1.5's), which is what the original reads"
        source.note(text, "num_attention_heads", "num_key_value_heads", "rope_parameters")
    heads = said.get("num_attention_heads", int, phi.num_attention_heads)
    kv_heads = heads
    if not said.values.get("num_attention_heads"):
        kv_heads = phi.num_key_value_heads or heads
    return {
        "intermediate_size": source.shape("backbone.layers.0.mlp.fc1.weight", 2)[0],
        "hidden_act": "gelu_new",
        "layer_norm_eps": NORM_EPS,
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("num_key_value_heads", int, kv_heads),
        "rope_parameters": rope_parameters(said, phi.rope_parameters),
        "max_position_embeddings": said.get("max_position_embeddings", int, phi.max_position_embeddings),
    }


def _llama_block(source: ForeignCheckpoint, found: list[Layer]) -> dict[str, Any]:
    whole = model_input(source)
    base = source.base
    said = Section({}, "")
    if found[0].block == "qwen2block":
        default = Qwen2Config()
    else:
        default = LlamaConfig()
    qwen = any(layer.core == "qwen2attention" for layer in found)
    _agreed([layer.block_input for layer in found], ("mlp_act_fn",), "blocks")
    attention = [layer.core_input for layer in found if layer.core in ATTENTION]
    if attention:
        said = _agreed(attention, ATTENTION_SIZES, "attention layers")
        base = None  # a layer that is silent has its class's defaults
        for text in _ignored_rotary(attention, whole, default):
            source.note(text, "rope_parameters")
    heads = said.get("num_attention_heads", int, (base or default).num_attention_heads)
    kv_heads = said.get("num_key_value_heads", int, base.num_key_value_heads if base else heads)
    has_bias = said.get("attention_bias", bool, False)
    return {
        "intermediate_size": source.shape("backbone.layers.0.mlp.gate_proj.weight", 2)[0],
        "hidden_act": found[0].block_input.get("mlp_act_fn", str, "silu"),
        "rms_norm_eps": _norm_eps(source, found),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": said.get("head_dim", int, getattr(base, "head_dim", None)),
        "rope_parameters": rope_parameters(whole, default.rope_parameters),
        "max_position_embeddings": whole.get("max_position_embeddings", int, default.max_position_embeddings),
        "attention_bias": qwen or has_bias,
        "attention_out_bias": not qwen and has_bias,
    }


def _norm_eps(source: ForeignCheckpoint, found: list[Layer]) -> float:
    """The epsilon of all norms; a ValueError where they differ."""
    said = {section.get("norm_epsilon", float) for section in (model_input(source), *(x.block_input for x in found))}
    stated = sorted(said - {None})
    if len(stated) > 1:
        raise ValueError(f"{model_input(source).file}: norms of different epsilon, {stated}; ours share one.")
    if not stated:
        source.note(f"no norm_epsilon in the configuration: {NORM_EPS}", "rms_norm_eps")
        return NORM_EPS
    return stated[0]


def _ignored_rotary(attention: list[Section], whole: Section, default: PreTrainedConfig) -> list[str]:
    """Notes on settings that the original ignores: it computes all angles from the settings of the whole model."""
    used = {"rope_theta": default.rope_parameters["rope_theta"], "rope_scaling": None}
    used["max_position_embeddings"] = default.max_position_embeddings
    used |= {name: whole.values[name] for name in used if whole.values.get(name) is not None}
    return [
        f"{name} of the attention layers is left out: the original computes all angles from MixerModel.input"
        for name in used
        if any(layer.values.get(name, used[name]) != used[name] for layer in attention)
    ]


def table(source: ForeignCheckpoint, config: PreTrainedConfig) -> tuple[Table, dict[str, str]]:
    """Map the hybrid's tensors to their sources, and list those of the checkpoint that are left out."""
    rows, dropped = head_and_embedding(source, EMBEDDING, config)
    if config.model_type == "phimamba":
        with_bias = ("weight", "bias")
        mlp = ("fc1", "fc2")
        norms = ("input_layernorm",)
    else:
        with_bias = ("weight",)
        mlp = ("gate_proj", "up_proj", "down_proj")
        norms = ("input_layernorm", "post_attention_layernorm")
    for kind in with_bias:
        rows[f"model.norm.{kind}"] = renamed(f"backbone.final_layernorm.{kind}")
    for i, layer_type in enumerate(config.layer_types):
        ours = f"model.layers.{i}."
        theirs = f"backbone.layers.{i}."
        for name in (*norms, *(f"mlp.{part}" for part in mlp)):
            rows |= {f"{ours}{name}.{kind}": renamed(f"{theirs}{name}.{kind}") for kind in with_bias}
        if layer_type == "linear_attention":
            rows |= mixer_table(source, config, f"{ours}mixer.", f"{theirs}mixer.")
        else:
            rows |= _attention_table(config, f"{ours}self_attn.", f"{theirs}mixer.self_attn.")
    return rows, dropped | rotary_buffers(source)


def _attention_table(config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    names = {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if config.model_type == "phimamba":
        names["o_proj"] = "dense"
    rows = {f"{ours}{mine}.weight": renamed(f"{theirs}{name}.weight") for mine, name in names.items()}
    has_bias = dict.fromkeys(names, config.attention_bias) | {"o_proj": config.attention_out_bias}
    for mine, name in names.items():
        if has_bias[mine]:
            rows[f"{ours}{mine}.bias"] = renamed(f"{theirs}{name}.bias")
    return rows


def mixer_table(source: ForeignCheckpoint, config: PreTrainedConfig, ours: str, theirs: str) -> Table:
    """A discrete Mamba-2 mixer: the layout is ours, except that several heads may share one of B and C."""
    heads = config.mixer_num_heads
    state = config.mixer_d_state
    inner = config.mixer_num_heads * config.mixer_head_dim
    groups = (source.shape(f"{theirs}conv1d.weight", 3)[0] - inner) // (2 * state)
    times = heads // max(groups, 1)
    starts = [0, inner, inner + groups * state, inner + 2 * groups * state]

    def streams(name: str, *rest: Part) -> tuple[Part, ...]:
        if times == 1:
            return renamed(name)
        x, B, C = ((name, starts[k], starts[k + 1]) for k in range(3))
        return (Part(*x), Part(*B, block=state, times=times), Part(*C, block=state, times=times), *rest)

    weight = f"{theirs}in_proj.weight"
    bias = f"{theirs}in_proj.bias"
    rows = {f"{ours}{name}": renamed(f"{theirs}{name}") for name in ("D", "out_proj.weight")}
    if config.mixer_gate_bias:
        rows[f"{ours}z_bias"] = renamed(f"{theirs}z_bias")
    for name in ("conv1d.weight", "conv1d.bias"):
        rows[f"{ours}{name}"] = streams(f"{theirs}{name}")
    if f"{theirs}conv1d.bias" not in source.tensors:
        rows[f"{ours}conv1d.bias"] = (Fill(inner + 2 * heads * state),)
    rows[f"{ours}in_proj.weight"] = streams(weight, Part(weight, starts[3]))
    if config.mixer_in_bias:
        rows[f"{ours}in_proj.bias"] = streams(bias, Part(bias, starts[3]))
    if config.mixer_out_bias:
        rows[f"{ours}out_proj.bias"] = renamed(f"{theirs}out_proj.bias")
    return rows


GOOMBALAB = Format(
    name="goombalab Phi-Mamba / mohawk",
    sign="backbone.* tensors, a config.json with MixerModel",
    hybrid=hybrid_of,
    recognises=lambda source: EMBEDDING in source.tensors and "MixerModel" in components(source).values,
    fields=fields,
    table=table,
)
