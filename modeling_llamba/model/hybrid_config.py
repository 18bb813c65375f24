"""Common configuration of both hybrid families: attention, mixers, and the kind of each layer."""

import copy
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..ship_code import auto_map_of, ship_code
from .config_rules import check_config
from .config_values import check_numbers

FORMAT_VERSION = 2
"""Version of the weights and the configuration of a hybrid. In version 1 hybrid layers had a projection for the first
tokens and evicted token by token."""


def mixer_defaults(mixer: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of a mixer that follow from its kind: as published, for Mamba-1 and Mamba-2."""
    return {
        "mixer_d_state": min(16, head_dim) if mixer == "mamba1" else head_dim,
        "mixer_activation": "identity" if mixer == "discrete_mamba2" else "silu",
        "mixer_norm": "head" if mixer == "mamba2" else "none",
    }


class HybridConfig(PreTrainedConfig):
    """Fields shared by LlambaConfig and PhiMambaConfig.

    Args:
        layer_types: one of "full_attention", "sliding_attention", "linear_attention" (a mixer), "hybrid" (attention to
            a window, sinks and salient tokens, and a state of what left the window: hybrid_attention.py), "conv" (the
            teacher's own module with a state, of whatever kind: recurrent.py) per layer.
        resid_pdrop, embd_pdrop: dropout on the residual branches and on the embeddings.
        attention_bias: bias on q, k and v of the attention layers. attention_out_bias: bias on their o_proj.
        attention_gate: what the heads return is multiplied by the sigmoid of a projection of the layer's input.
        learned_sinks: each head has a score of its own, to which attention goes that no token gets.
        value_norm: values are normed head by head, without weights.
        sliding_heads: num_key_value_heads and head_dim of layers with sliding attention, where those of other layers
            are not the same; such layers are never replaced, and they alone have a "local" rotary embedding.
        recurrent: model_type and fields of the teacher's configuration that its module with a state is made from.
        qk_norm: norm on queries and keys: None, "rms" or "layer" on each head, "all_heads" on all heads together.
        norm_unit_offset: RMSNorms outside of mixers multiply by 1 + weight.
        embedding_multiplier: factor on the embeddings. logits_scaling: divisor of the logits.
        attention_multiplier: factor on the attention scores, 1 / sqrt(head_dim) by default.
        attn_logit_softcapping, final_logit_softcapping: x becomes cap tanh(x / cap), for scores (of attention layers
            and windows; a mixer has none) and for logits.
        rope_parameters: transformers' own; llama_4_scaling_beta among them makes queries grow with their position.
        layer_rope: rotary embedding of each layer: "main" (by rope_parameters, the default), "local" (by
            local_rope_parameters) or "none".
        mixer: the matrix mixer of the linear layers: "discrete_mamba2", "mamba2" or "mamba1"; or "none", where hybrid
            layers have no state.
        mixer_num_heads (H), mixer_num_kv_heads (G, heads of x and B), mixer_head_dim (P), mixer_d_state (N).
        mixer_d_conv: width of the short convolution. mixer_activation: after it, "identity" or "silu".
        mixer_norm: before out_proj, "none", "head" (gated RMSNorm per head) or "whole" (over all heads).
        mixer_norm_eps: epsilon of that norm; the model's own by default. Mamba in the Llama fixes it at 1e-5.
        mixer_rotary: apply the model's rotary embedding to B and C.
        mixer_qk_norm: norm per head on C and B, as qk_norm.
        mixer_decay_bias: a learned bias on the decay logit (discrete_mamba2 only; the others have dt_bias).
        mixer_shared_state: one decay, and with it one state, per head of x and B instead of per head.
        mixer_gate_bias: a learned bias z_bias inside the gate.
        mixer_in_bias, mixer_out_bias: bias on in_proj and out_proj.
        hybrid_window: columns of a hybrid layer's window, a multiple of hybrid_block and two blocks at least; a list,
            with an entry for every layer, where they differ.
        hybrid_block: tokens of a block; the window moves by blocks.
        hybrid_sinks: first tokens that are always attended to.
        hybrid_sink_reach: distance from which a sink farther away is attended to; max_position_embeddings by default.
        hybrid_salient: number of tokens that are attended to after they have left the window.
        hybrid_state_planes: planes of each key, those that the rotary embedding turns slowest, that the state keeps;
            all of them by default. Dimensions that are not rotated are kept in any case.
        full_attention_bits: bits of a key's or value's number in the cache of full attention, that of kept heads
            included: 16 (the model's own type), 8, 6, 4 or 2; as a list, those of keys and those of values.
        key_offsets: keys that are rounded are held less an offset of their head, which changes no softmax.
        window_bits: the same for hybrid layers' windows, sinks and salient tokens, and for sliding attention.
        hybrid_rank: rank of the map that a hybrid layer adds to o_proj, 0 for none; a list, with an entry for every
            layer, where they differ.
        hybrid_full_heads: for each layer, the query heads of a hybrid layer that keep full attention: all that share a
            key/value head, or none of them.
        format_version: version of the layout of weights and configuration; FORMAT_VERSION for what this code writes.
        mixer_dt_rank: rank of the step size projection (mamba1 only).
        mixer_chunk_size: tokens per chunk of the scan.
        backend: "auto", "torch", "mamba_ssm" or "fla"; the environment variable HYBRID_BACKEND overrides it.
        conversion: where the weights come from; written by convert-to-hybrid.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    ignore_keys_at_rope_validation = {"llama_4_scaling_beta"}

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    attention_dropout: float | int = 0.0
    attention_gate: bool = False
    learned_sinks: bool = False
    value_norm: bool = False
    sliding_heads: dict[str, int] | None = None
    recurrent: dict[str, Any] | None = None
    qk_norm: str | None = None
    norm_unit_offset: bool = False
    embedding_multiplier: float | int = 1.0
    attention_multiplier: float | int | None = None
    attn_logit_softcapping: float | int | None = None
    logits_scaling: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    local_rope_parameters: dict | None = None
    layer_rope: list[str] | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    mixer: str = "discrete_mamba2"
    mixer_num_heads: int | None = None
    mixer_num_kv_heads: int | None = None
    mixer_head_dim: int | None = None
    mixer_d_state: int | None = None
    mixer_d_conv: int = 4
    mixer_activation: str | None = None
    mixer_norm: str | None = None
    mixer_norm_eps: float | None = None
    mixer_rotary: bool = False
    mixer_qk_norm: str | None = None
    mixer_decay_bias: bool = False
    mixer_shared_state: bool = False
    mixer_gate_bias: bool = True
    mixer_in_bias: bool = False
    mixer_out_bias: bool = False
    mixer_dt_rank: int | None = None
    hybrid_window: int | list[int] | None = None
    hybrid_block: int = 16
    hybrid_sinks: int = 4
    hybrid_sink_reach: int | None = None
    hybrid_salient: int = 0
    hybrid_state_planes: int | None = None
    hybrid_rank: int | list[int] = 0
    hybrid_full_heads: list[list[int]] | None = None
    full_attention_bits: int | list[int] = 16
    key_offsets: bool = False
    window_bits: int | list[int] = 16
    mixer_chunk_size: int = 64
    backend: str = "auto"
    conversion: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        self.backend = kwargs.pop("mixer_backend", self.backend)  # its name up to version 0.2
        check_numbers(vars(self))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * self.num_hidden_layers
        if self.mixer_num_heads is None:
            self.mixer_num_heads = self.num_attention_heads
        if self.mixer_num_kv_heads is None:
            self.mixer_num_kv_heads = self.mixer_num_heads
        if self.mixer_head_dim is None:
            self.mixer_head_dim = self.head_dim
        for name, value in mixer_defaults(self.mixer, self.mixer_head_dim).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.mixer_dt_rank is None and self.mixer == "mamba1":
            self.mixer_dt_rank = -(-self.hidden_size // 16)
        if self.hybrid_sink_reach is None:
            self.hybrid_sink_reach = self.max_position_embeddings
        super().__post_init__(**kwargs)
        self.validate_hybrid()

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def rotary_planes(self) -> int:
        """Number of planes of a head that a rotary embedding turns; a plane is a pair of dimensions."""
        turned = int(self.head_dim * (self.rope_parameters or {}).get("partial_rotary_factor", 1.0))
        return (turned + 1) // 2  # of an odd number transformers turns one dimension more

    @property
    def head_widths(self) -> set[int]:
        """Dimensions of a head, of all types of layer."""
        return {self.of_kind(kind).head_dim for kind in ("full_attention", "sliding_attention")}

    def of_kind(self, layer_type: str) -> "HybridConfig":
        """This configuration with the heads of this type of layer."""
        if layer_type != "sliding_attention" or self.sliding_heads is None:
            return self
        of_kind = copy.copy(self)
        vars(of_kind).update(self.sliding_heads)
        return of_kind

    def state_planes(self, layer: int) -> int:
        """Number of rotary planes of a key that a hybrid layer's state keeps; all if it has no rotary embedding."""
        if self.hybrid_state_planes is None or self.rope_of(layer) == "none":
            return self.rotary_planes
        return min(self.hybrid_state_planes, self.rotary_planes)

    def state_keys(self, layer: int) -> int:
        """Number of dimensions of a key that a hybrid layer's state keeps."""
        return self.head_dim - 2 * (self.rotary_planes - self.state_planes(layer))

    def rope_of(self, layer: int) -> str:
        """The kind of rotary embedding of a layer."""
        return "main" if self.layer_rope is None else self.layer_rope[layer]

    def window_of(self, layer: int) -> int:
        """Width of a hybrid layer's window in tokens."""
        return self.hybrid_window[layer] if isinstance(self.hybrid_window, list) else self.hybrid_window

    def rank_of(self, layer: int) -> int:
        """Rank of the map that a hybrid layer adds to o_proj."""
        return self.hybrid_rank[layer] if isinstance(self.hybrid_rank, list) else self.hybrid_rank

    def full_heads_of(self, layer: int) -> list[int]:
        """Query heads of a hybrid layer that keep full attention."""
        return [] if self.hybrid_full_heads is None else list(self.hybrid_full_heads[layer])

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """transformers' own, for a configuration that this code can read.

        Raises:
            ValueError: it was written by code of another version, for weights laid out otherwise.
        """
        version, types = config_dict.get("format_version", 1), config_dict.get("layer_types") or ()
        if version > FORMAT_VERSION or (version < FORMAT_VERSION and "hybrid" in types):
            raise ValueError(
                f"This hybrid has format {version}; the installed convert-to-hybrid reads format {FORMAT_VERSION}. "
                "Load it with the code that it carries (trust_remote_code=True, in a process that does not import "
                "modeling_llamba or convert), or convert its teacher again."
            )
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """transformers' own, which config.json is made of; fields of mixers only where there are any.

        One matters without mixers: `mixer: none`, where hybrid layers have no state.
        """
        fields = super().to_diff_dict()
        if "linear_attention" in self.layer_types:
            return fields
        kept = {"mixer"} if self.mixer == "none" else set()
        return {name: value for name, value in fields.items() if name in kept or not name.startswith("mixer")}

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write config.json and the code it names; a model's `save_pretrained` comes here, too.

        Args:
            push_to_hub: upload both; `kwargs` are then those of `push_to_hub`.
        """
        self.auto_map = auto_map_of(type(self))
        os.makedirs(save_directory, exist_ok=True)
        ship_code(self, save_directory)
        super().save_pretrained(save_directory, **kwargs)  # last: config.json makes the folder a checkpoint
        if push_to_hub:  # not the inherited way, which would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def validate_hybrid(self) -> None:
        """Refuse contradictory fields by a ValueError that names the field and what it may be."""
        check_config(self)
