"""Granite 4: Mamba-2 in most layers, which stay as they are, and Granite 3's attention in the others, often without a
rotary embedding. All tokens share an expert, beside a choice of others or alone."""

from .base import EXPERTS, TeacherFamily
from .granite import GRANITE
from .llama import ATTENTION_TENSORS, OTHER_TENSORS

BLOCK = "model.layers.{i}."
EXPERTS_OF_THEIRS = f"{BLOCK}block_sparse_moe."
MLPS = (f"{BLOCK}mlp.", f"{BLOCK}mlp.shared_expert.")
"""Places of the shared expert, which is the MLP where there are no others."""
MAMBA = (
    "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "in_proj.weight", "in_proj.bias", "norm.weight",
    "out_proj.weight", "out_proj.bias",
)  # fmt: skip


def experts_and_rope(config) -> dict[str, object]:
    """The fields of the MLP or the experts, and no rotary embedding where the teacher has none."""
    shared = config.shared_intermediate_size
    fields: dict[str, object] = {"intermediate_size": shared}
    if config.num_local_experts:
        fields |= {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
        fields |= {"moe_intermediate_size": config.intermediate_size, "shared_expert_intermediate_size": shared}
        fields |= {"norm_topk_prob": True, "shared_expert_gate": False}
        fields |= {"router_aux_loss_coef": config.router_aux_loss_coef}
    has_rope = config.position_embedding_type == "rope"
    return fields | ({} if has_rope else {"layer_rope": ["none"] * config.num_hidden_layers})


GRANITE_MOE_HYBRID = TeacherFamily(
    model_type="granitemoehybrid",
    title="Granite 4",
    hybrid="llamba",
    tensors={
        **OTHER_TENSORS,
        **ATTENTION_TENSORS,
        **{f"{BLOCK}mamba.{name}": f"{BLOCK}recurrent.module.{name}" for name in MAMBA},
        f"{BLOCK}shared_mlp.input_linear.weight": tuple(
            f"{mlp}{part}_proj.weight" for mlp in MLPS for part in ("gate", "up")
        ),
        f"{BLOCK}shared_mlp.output_linear.weight": tuple(f"{mlp}down_proj.weight" for mlp in MLPS),
        f"{EXPERTS_OF_THEIRS}router.layer.weight": f"{BLOCK}mlp.gate.weight",
        f"{EXPERTS_OF_THEIRS}input_linear.weight": f"{EXPERTS}gate_up_proj",
        f"{EXPERTS_OF_THEIRS}output_linear.weight": f"{EXPERTS}down_proj",
    },
    fields={name: theirs for name, theirs in GRANITE.fields.items() if name != "mlp_bias"},
    recurrent=(
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
        "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    ),
    special=experts_and_rope,
)  # fmt: skip
