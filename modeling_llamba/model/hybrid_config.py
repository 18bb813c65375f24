"""Common configuration of both hybrid families: attention, mixers, and the kind of each layer."""

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..ship_code import ship_code

MIXERS = ("discrete_mamba2", "mamba2", "mamba1", "none")
RECURRENT = "conv"
"""Entry of `layer_types` for a layer that keeps its teacher's own module with a state, whatever it is (recurrent.py).
transformers' caches accept two names for such layers, and the other, linear_attention, stands for mixers here."""
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "hybrid", RECURRENT)
QK_NORMS = (None, "rms", "layer", "all_heads")
ROPES = ("main", "local", "none")
BACKENDS = ("auto", "torch", "mamba_ssm", "fla")
CACHE_BITS = (16, 8, 6, 4, 2)
ROPE_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# names in transformers' ACT2FN, whose import takes seconds; those with parameters of their own are left out
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
)  # fmt: skip
ATTENTION_ALONE = ("attention_gate", "learned_sinks", "value_norm", "sliding_heads")
"""Fields of the attention that a mixer cannot follow."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "mixer_num_heads", "mixer_num_kv_heads",
    "mixer_head_dim", "mixer_d_state", "mixer_d_conv", "mixer_chunk_size",
)  # fmt: skip
FORMAT_VERSION = 2
"""Version of the weights and the configuration of a hybrid. In version 1 hybrid layers had a projection for the first
tokens and evicted token by token."""
LARGEST_SIZE = 2**31 - 1
SIZES_OF_STATES = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_chunk_size", "conv_L_cache",
)  # fmt: skip
"""Sizes of a teacher's own module with a state."""
# smallest and largest value of every number in a configuration, this one's or a teacher's; whole where they are whole
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys((*SIZES, "sliding_window", "hybrid_sink_reach", "mixer_dt_rank"), (1, LARGEST_SIZE)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "mixer_norm_eps"), (0.0, 1.0)),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), (0.0, 1.0)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), (1e-06, 1000000.0)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "initializer_range"), (0.0, 1000000.0)),
    **dict.fromkeys(SIZES_OF_STATES, (1, LARGEST_SIZE)),
    "num_hidden_layers": (1, 10_000),
    "num_experts": (1, 10_000),
    "num_experts_per_tok": (1, 10_000),
    "moe_intermediate_size": (1, LARGEST_SIZE),
    "shared_expert_intermediate_size": (1, LARGEST_SIZE),
    "max_window_layers": (0, LARGEST_SIZE),
    "decoder_sparse_step": (1, LARGEST_SIZE),
    "query_pre_attn_scalar": (1e-6, 1e9),
    "original_max_position_embeddings": (1, LARGEST_SIZE),
    "rope_theta": (1e-6, 1e30),
    "llama_4_scaling_beta": (0.0, 1e6),
    "partial_rotary_factor": (1e-6, 1.0),
    "hybrid_window": (2, 2**24),
    "hybrid_block": (1, 2**16),
    "hybrid_rank": (0, 2**16),
    "hybrid_sinks": (0, 2**24),
    "hybrid_salient": (0, 2**24),
    "hybrid_state_planes": (1, 2**24),
}


NESTED = (
    "text_config", "rope_parameters", "local_rope_parameters", "rope_scaling", "full_attention", "sliding_attention",
    "sliding_heads", "recurrent",
)  # fmt: skip


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse a number of a configuration, or of the rotary settings in it, that no model can have.

    Raises:
        ValueError: naming the field and what it may be.
    """
    for name, value in values.items():
        if name in NESTED and isinstance(value, Mapping):
            check_numbers(value)
        elif name in ("short_factor", "long_factor") and value is not None:
            numbers = value if isinstance(value, (list, tuple)) else [None]
            if not all(isinstance(number, (int, float)) and 0 < number < 1e9 for number in numbers):
                raise ValueError(f"{name} of RoPE must be a list of numbers above 0, not {str(value)[:40]}.")
        elif name in ("hybrid_window", "hybrid_rank") and isinstance(value, list):
            for number in value:
                check_numbers({name: number or None})  # 0 where a layer is not hybrid
        elif name in BOUNDS and value is not None:
            low, high = BOUNDS[name]
            kind, what = (int, "a whole number") if isinstance(low, int) else ((int, float), "a number")
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                limit = f"at most {high}" if isinstance(value, kind) and value > high else f"at least {low}"
                raise ValueError(f"{name} must be {what} of {limit}, not {str(value)[:40]}.")


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
        mixer_backend: "auto", "torch", "mamba_ssm" or "fla"; the environment variable HYBRID_SSD_BACKEND overrides it.
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
    mixer_backend: str = "auto"
    conversion: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        check_numbers(vars(self))
        if not isinstance(self.rope_parameters, (dict, type(None))):
            raise ValueError(f"rope_parameters must be a dictionary, not {self.rope_parameters!r}.")
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

        Two matter without mixers: `mixer: none`, where hybrid layers have no state, and `mixer_backend`.
        """
        fields = super().to_diff_dict()
        if "linear_attention" in self.layer_types:
            return fields
        kept = {"mixer_backend"}
        if self.mixer == "none":
            kept.add("mixer")
        return {name: value for name, value in fields.items() if name in kept or not name.startswith("mixer")}

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write config.json and the code it names; a model's `save_pretrained` comes here, too.

        Args:
            push_to_hub: upload both; `kwargs` are then those of `push_to_hub`.
        """
        name, family = self.model_type, type(self).__name__.removesuffix("Config")
        self.auto_map = {
            "AutoConfig": f"configuration_{name}.{family}Config",
            "AutoModel": f"modeling_{name}.{family}Model",
            "AutoModelForCausalLM": f"modeling_{name}.{family}ForCausalLM",
            "AutoModelForSequenceClassification": f"modeling_{name}.{family}ForSequenceClassification",
        }
        os.makedirs(save_directory, exist_ok=True)
        ship_code(type(self), save_directory)
        super().save_pretrained(save_directory, **kwargs)  # last: config.json makes the folder a checkpoint
        if push_to_hub:  # not the inherited way, which would upload config.json alone
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def validate_hybrid(self) -> None:
        """Refuse contradictory fields.

        Raises:
            ValueError: naming the field and what it may be.
        """
        for name, allowed in {
            "mixer": MIXERS,
            "mixer_activation": ("identity", "silu"),
            "mixer_norm": ("none", "head", "whole"),
            "qk_norm": QK_NORMS,
            "mixer_qk_norm": QK_NORMS,
            "mixer_backend": BACKENDS,
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}.")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of transformers' activations, not {self.hidden_act!r}.")
        check_numbers(vars(self))
        absent = [name for name in SIZES if getattr(self, name) is None]
        if absent:
            raise ValueError(f"{absent[0]} must be a whole number of at least 1, not None.")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is no token of a vocabulary of {self.vocab_size}.")
        for name in ("embedding_multiplier", "attention_multiplier", "logits_scaling", *SOFT_CAPS):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, not {value!r}.")
        self._validate_rotary()
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types needs {self.num_hidden_layers} entries out of {LAYER_TYPES}; "
                f"got {len(self.layer_types)}" + (f", unknown: {unknown}." if unknown else ".")
            )
        if self.sliding_heads is not None:
            self._validate_sliding_heads()
        for name in ("full_attention_bits", "window_bits"):
            self._validate_bits(name)
        if self.key_offsets and (self.learned_sinks or self.attn_logit_softcapping is not None):
            raise ValueError("Beside learned_sinks or attn_logit_softcapping scores change with key_offsets.")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, so sliding_window must be set.")
        if RECURRENT in self.layer_types and self.recurrent is None:
            raise ValueError(f"layer_types has {RECURRENT}, so recurrent must say what these layers are.")
        alone = [name for name in ATTENTION_ALONE if getattr(self, name)]
        if alone and "linear_attention" in self.layer_types:
            raise ValueError(f"A mixer cannot follow {alone[0]}; use hybrid layers.")
        if self.learned_sinks and self.attn_logit_softcapping is not None:
            raise ValueError("No attention of transformers' knows learned_sinks and attn_logit_softcapping together.")
        for kind in ("full_attention", "sliding_attention"):
            if self.num_attention_heads % self.of_kind(kind).num_key_value_heads:
                raise ValueError("num_attention_heads must be a multiple of num_key_value_heads.")
        if self.mixer_num_heads % self.mixer_num_kv_heads:
            raise ValueError("mixer_num_heads must be a multiple of mixer_num_kv_heads.")
        if self.mixer == "mamba1" and self.mixer_head_dim % self.mixer_d_state:
            raise ValueError(
                "mamba1 cuts each head into pieces of mixer_d_state channels, so mixer_head_dim "
                f"({self.mixer_head_dim}) must be a multiple of it ({self.mixer_d_state})."
            )
        if self.mixer == "mamba1" and (self.mixer_rotary and self.mixer_d_state != self.mixer_head_dim):
            raise ValueError("mamba1 with mixer_rotary needs mixer_d_state == mixer_head_dim.")
        if self.mixer_decay_bias and self.mixer != "discrete_mamba2":
            raise ValueError("mixer_decay_bias exists for discrete_mamba2 only; the other mixers have dt_bias.")
        if self.mixer_backend in ("mamba_ssm", "fla") and self.mixer == "mamba1":
            raise ValueError("mamba1 runs on the torch scan only; use mixer_backend 'auto' or 'torch'.")
        if self.mixer_shared_state and self.mixer == "mamba1":
            raise ValueError("mamba1 has a decay per channel; mixer_shared_state exists for the other mixers.")
        if self.mixer_norm != "none" and self.mixer != "mamba2":
            raise ValueError("mixer_norm exists for the mamba2 mixer only; use 'none'.")
        if self.mixer == "none" and "linear_attention" in self.layer_types:
            raise ValueError("layer_types has linear_attention, so mixer must be one of the mixers, not 'none'.")
        self._validate_window()

    def _validate_bits(self, name: str) -> None:
        value = getattr(self, name)
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not set(pair) <= set(CACHE_BITS):
            raise ValueError(
                f"{name} must be one of {CACHE_BITS}, or a list of two for keys and values, not {value!r}."
            )
        for width in self.head_widths:
            if min(pair) < 8 and width % 16:
                raise ValueError(f"{name} of less than 8 needs a head_dim that is a multiple of 16, not {width}.")
            if min(pair) < 16 and width % 2:
                raise ValueError(f"{name} of less than 16 needs an even head_dim, not {width}.")

    def _validate_sliding_heads(self) -> None:
        if set(self.sliding_heads) != {"num_key_value_heads", "head_dim"} or None in self.sliding_heads.values():
            raise ValueError(f"sliding_heads needs num_key_value_heads and head_dim, not {self.sliding_heads!r}.")
        if self.attention_multiplier is None:
            raise ValueError("With sliding_heads, attention_multiplier says the one factor on all scores.")
        local = [self.rope_of(i) == "local" for i in range(self.num_hidden_layers)]
        if local != [kind == "sliding_attention" for kind in self.layer_types]:
            raise ValueError("With sliding_heads, layer_rope is local where layer_types has sliding_attention.")

    def _validate_rotary(self) -> None:
        layers = ["main"] * self.num_hidden_layers if self.layer_rope is None else self.layer_rope
        if len(layers) != self.num_hidden_layers or not set(layers) <= set(ROPES):
            raise ValueError(f"layer_rope needs {self.num_hidden_layers} entries out of {ROPES}, not {layers}.")
        if ("local" in layers) != (self.local_rope_parameters is not None):
            raise ValueError("local_rope_parameters is needed where layer_rope has local, and nowhere else.")
        for rope in (self.rope_parameters, self.local_rope_parameters):
            if rope is not None:
                self._validate_rope(rope)
        rotated = set(layers) != {"none"} and set(self.layer_types) - {"linear_attention", RECURRENT}
        if rotated and self.rope_parameters is not None and 2 * self.rotary_planes > self.head_dim:
            raise ValueError(f"head_dim must be even where a rotary embedding turns all of it, not {self.head_dim}.")

    @staticmethod
    def _validate_rope(rope: dict[str, Any]) -> None:
        kinds = ("default", *sorted(ROPE_INIT_FUNCTIONS))
        kind = rope.get("rope_type")
        if kind not in kinds:
            raise ValueError(f"rope_type must be one of {kinds}, not {kind!r}.")
        scaled = ("original_max_position_embeddings",) if rope.get("llama_4_scaling_beta") is not None else ()
        for name in ("rope_theta", "partial_rotary_factor", *ROPE_NUMBERS.get(kind, ()), *scaled):
            value = rope.get(name, 1.0 if name == "partial_rotary_factor" else None)
            if not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{name} of RoPE {kind} must be a number above 0, not {value!r}.")
        for name in ("short_factor", "long_factor") if kind == "longrope" else ():
            if rope.get(name) is None:
                raise ValueError(f"{name} of RoPE {kind} must be a list of numbers above 0, not None.")

    def _validate_window(self) -> None:
        if "hybrid" in self.layer_types:
            hybrids = [i for i, kind in enumerate(self.layer_types) if kind == "hybrid"]
            for name in ("hybrid_window", "hybrid_rank"):
                value = getattr(self, name)
                if isinstance(value, list) and len(value) != self.num_hidden_layers:
                    raise ValueError(f"{name} as a list needs {self.num_hidden_layers} entries, one a layer.")
            for width in sorted({self.window_of(i) or 0 for i in hybrids}):
                if width < 2 * self.hybrid_block or width % self.hybrid_block:
                    raise ValueError(
                        f"layer_types has hybrid, so hybrid_window must be a multiple of hybrid_block "
                        f"({self.hybrid_block}) and at least two of it, not {width}."
                    )
            main = self.rope_parameters or {}
            ropes = [main, *(self.local_rope_parameters for i in hybrids if self.rope_of(i) == "local")]
            shares = {rope.get("partial_rotary_factor", 1.0) for rope in ropes}
            if self.mixer != "none" and (main.get("rope_type") == "proportional" or len(shares) > 1):
                raise ValueError(
                    "The state of a hybrid layer needs one partial_rotary_factor for all of them and a rope_type that "
                    "is not 'proportional'; use mixer 'none'."
                )
        if self.hybrid_full_heads is None:
            return
        if len(self.hybrid_full_heads) != self.num_hidden_layers:
            raise ValueError(f"hybrid_full_heads needs a list of heads for each of {self.num_hidden_layers} layers.")
        for i, heads in enumerate(self.hybrid_full_heads):
            if heads and self.layer_types[i] != "hybrid":
                raise ValueError(f"hybrid_full_heads names heads of layer {i}, which is not hybrid.")
            if len(set(heads)) != len(heads) or not set(heads) <= set(range(self.num_attention_heads)):
                raise ValueError(
                    f"hybrid_full_heads of layer {i} must be different heads below "
                    f"{self.num_attention_heads}; got {heads}."
                )
            shared = self.num_attention_heads // self.num_key_value_heads
            groups = {head // shared for head in heads}
            if len(groups) * shared != len(heads) or len(groups) == self.num_key_value_heads:
                raise ValueError(
                    f"hybrid_full_heads of layer {i} must name all {shared} query heads of a key/value head or none, "
                    f"and leave a key/value head out; got {heads}."
                )
