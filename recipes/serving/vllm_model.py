"""Llamba and PhiMamba as vLLM drives them: the modelling code's own blocks, with paged attention and slots in them."""

from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import maybe_prefix
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from modeling_llamba.hybrid.inputs import HybridInputs
from modeling_llamba.model.causal_lm import finish_logits
from modeling_llamba.model.hybrid_model import LENGTH_DEPENDENT_ROTARY, HybridModel
from modeling_llamba.model.rotary import Rotary
from modeling_llamba.modeling_llamba import LlambaModel
from modeling_phimamba.modeling_phimamba import PhiMambaModel

from .pages import RequestMemory, Sizing
from .slots import HybridSlots, MixerSlots, RoundedAttention

LEAST_PACKED = 128
"""Rows and columns that vLLM's product with packed weights is for: one of 31 rows takes it 360 us, torch 7."""
CACHE_TYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of --kv-cache-dtype that are served."""
MODELS: dict[str, type[HybridModel]] = {"llamba": LlambaModel, "phimamba": PhiMambaModel}


def refuse(vllm_config: VllmConfig) -> None:
    """Stop at what cannot be served.

    Raises:
        ValueError: naming it, and the way out.
    """
    config = vllm_config.model_config.hf_config
    parallel = vllm_config.parallel_config
    length = vllm_config.model_config.max_model_len
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "Hybrids are served on one device: leave out --tensor-parallel-size, --pipeline-parallel-size."
        )
    if vllm_config.speculative_config is not None:
        raise ValueError("A hybrid's state cannot be taken back in vLLM: leave out --speculative-config.")
    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            "A hybrid's pages are not moved by a KV connector: leave out --kv-transfer-config, --kv-offloading-size."
        )
    if vllm_config.cache_config.cache_dtype not in CACHE_TYPES:
        raise ValueError("A hybrid's cache is in the checkpoint's bits: leave out --kv-cache-dtype, or give fp8.")
    if vllm_config.lora_config is not None:
        raise ValueError("Adapters are not served: merge them into the weights (merge_and_unload) and leave out LoRA.")
    if vllm_config.quant_config is not None:
        raise ValueError("Quantised hybrids are not served: leave out --quantization.")
    if config.mixer == "mamba1" and "linear_attention" in config.layer_types:
        raise ValueError("The mixer mamba1 is not served: use transformers, or convert with another mixer.")
    unserved = {
        "Gates on attention": config.attention_gate,
        "Learned sinks": config.learned_sinks,
        "Windows whose heads are other ones": config.sliding_heads is not None,
        "Layers with a state of the teacher's own": config.recurrent is not None,
    }
    for what, is_so in unserved.items():
        if is_so:
            raise ValueError(f"{what} are not served: use transformers.")
    if getattr(config, "num_experts", None) is not None:
        raise ValueError("Experts are not served: use transformers.")
    for rope in (config.rope_parameters, config.local_rope_parameters):
        if rope is not None and rope["rope_type"] in LENGTH_DEPENDENT_ROTARY:
            within = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if length > within:
                raise ValueError(
                    f"The angles of RoPE {rope['rope_type']} depend on a text's length beyond {within} tokens, and "
                    f"vLLM runs texts of many lengths at once: give --max-model-len {within} or less."
                )


def paged_attention(module: nn.Module, query, key, value, attention_mask, **kwargs):
    """transformers' interface to an attention function; the module holds vLLM's, or a `RoundedAttention`."""
    tokens = (t[0].transpose(0, 1).flatten(1) for t in (query, key, value))
    return module.paged(*tokens).unflatten(-1, (-1, query.shape[-1]))[None], None


ALL_ATTENTION_FUNCTIONS.register("vllm_paged", paged_attention)


def hybrid_unfused(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; inductor does not compute the tensor again in its place."""
    return t.clone()


direct_register_custom_op(op_name="hybrid_unfused", op_func=hybrid_unfused, fake_impl=torch.empty_like)


@support_torch_compile
class ServedModel(nn.Module):
    """Embedding, blocks and final norm; all requests' tokens are one row."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        model = MODELS[config.model_type](config)
        self.embed_tokens = model.embed_tokens
        self.layers = model.layers
        self.norm = model.norm
        self.rotary = model.rotary
        # no sink is seen as from farther away than this
        reach = config.hybrid_sink_reach
        self.reach = reach if vllm_config.model_config.max_model_len > reach else None
        # transformers' name for the function, and what the function then finds
        config._attn_implementation = "vllm_paged"
        memory = RequestMemory(vllm_config, prefix)
        for i, layer in enumerate(self.layers):
            name = f"{prefix}.layers.{i}"
            if layer.layer_type == "hybrid":
                layer.mixer = HybridSlots(layer.mixer, i, memory, vllm_config, f"{name}.mixer")
            elif layer.layer_type == "linear_attention":
                layer.mixer = MixerSlots(layer.mixer, i, memory, vllm_config, f"{name}.mixer")
            elif (rows := memory.add_rows(i)) is not None:
                attention = layer.self_attn
                attention.paged = RoundedAttention(attention, rows, memory, vllm_config, f"{name}.self_attn")
            else:
                layer.self_attn.paged = Attention(
                    config.num_attention_heads,
                    config.head_dim,
                    config.score_scale,
                    num_kv_heads=config.num_key_value_heads,
                    cache_config=vllm_config.cache_config,
                    logits_soft_cap=config.attn_logit_softcapping,
                    per_layer_sliding_window=layer.self_attn.sliding_window,
                    prefix=f"{name}.self_attn",
                )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (L, hidden) of tokens (L,) or their embeddings (L, hidden)."""
        hidden_states = (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)[None]
        index = positions[None]
        rotary = self._angles(hidden_states, index)
        of_sinks = None if self.reach is None else self._angles(hidden_states, index.clamp(max=self.reach))
        masks = dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"))
        masks["hybrid"] = HybridInputs(index, sink_rotary=of_sinks)
        for layer in self.layers:
            hidden_states = layer(hidden_states, masks=masks, position_embeddings=rotary, seq_idx=None, cache=None)
        return self.norm(hidden_states)[0]

    def _angles(self, like: torch.Tensor, index: torch.Tensor) -> dict[str, Rotary]:
        """Rotary embedding of each kind, computed once: inductor would compute it anew in each layer."""
        found = self.rotary(like, index)
        return {kind: tuple(torch.ops.vllm.hybrid_unfused(t) for t in tensors) for kind, tensors in found.items()}


class ServedHybrid(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """Language model head on the model; what vLLM asks of a hybrid."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        refuse(vllm_config)
        self.config = vllm_config.model_config.hf_config
        self.model = ServedModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=self.config.lm_head_bias)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Size of a state that makes vLLM choose the block of `Sizing`: vLLM lengthens blocks until one of
        attention with all heads of a layer is larger than a state. `SlotPage` has its own size."""
        config = vllm_config.model_config.hf_config
        cache = vllm_config.cache_config
        dtype = vllm_config.model_config.dtype if cache.cache_dtype == "auto" else torch.uint8
        of_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        more = Sizing.of(vllm_config).block(cache.block_size) - cache.block_size
        return ((1 + more * of_token // 4,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Dtypes of the cache slot of one sequence, for vLLM's allocator."""
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        """A prefix is kept by copying slots whole, whatever is in them."""
        return (get_temporal_copy_spec,)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(L,) -> (L, hidden)."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Run the model, like `ServedModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(L, hidden) -> (L, vocabulary)."""
        return finish_logits(self.lm_head(hidden_states), self.config)

    def load_weights(self, weights) -> set[str]:
        """Fill parameters and buffers; returns the names of those filled.

        Raises:
            ValueError: the checkpoint has a tensor that the model has not, or of another shape.
        """
        places = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            # the checkpoint's mixer lies within the `SlotLayer` that took its place
            name = name.replace(".mixer.", ".mixer.mixer.")
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name not in places or places[name].shape != tensor.shape:
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} is no tensor of this model.")
            places[name].data.copy_(tensor)
            loaded.add(name)
        # vLLM packs only linear layers of its own, and these are torch's
        if current_platform.is_cpu():
            for linear in (module for module in self.modules() if isinstance(module, nn.Linear)):
                if min(linear.weight.shape) < LEAST_PACKED:
                    continue
                dispatch_cpu_unquantized_gemm(linear, remove_weight=False)
                linear.forward = partial(cpu_linear, linear)
        return loaded


def cpu_linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """vLLM's product with packed weights: for a few rows twice as fast as torch's."""
    return linear.cpu_linear(x.flatten(0, -2), linear.weight, linear.bias).unflatten(0, x.shape[:-1])
