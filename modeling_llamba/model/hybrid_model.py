"""The parts of a hybrid model that do not depend on the block: initialisation, masks, caches, the decoder loop, loss.

A family subclasses these and defines its blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_masks_for_generate,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_torchdynamo_compiling, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..compatibility import (
    CACHE_NAME,
    HybridOutput,
    one_cache,
    warn_if_newer,
)
from ..hybrid.inputs import HybridInputs
from .attention import SoftmaxAttention
from .cache import cache_length, fit_cache, new_cache, note_length
from .config_values import RECURRENT
from .mixer import make_mixer
from .norms import RMSNorm
from .rotary import Rotary, local_rotary_embedding, query_scale, rotary_embedding
from .sequences import drop_full_mask, is_padding_mask, packed_sequence_ids, positions_in_sequence, token_index

logger = logging.get_logger(__name__)
# rotary embeddings whose angles depend on the longest position in the call; a sink cannot be moved nearer under them
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")


# keyword arguments of transformers that this model follows, and those that change nothing in it: TRL asks it to keep a
# part of the logits, which it has none of
FOLLOWED = ("cu_seq_lens_q", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
WITHOUT_EFFECT = ("cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "logits_to_keep")


FIXED = ("salience", "key_offset", "layer_scalar")
"""Names of parameters through which no gradient passes."""


class HybridDecoderLayer(GradientCheckpointingLayer):
    """A block with attention (`self_attn`), or with a matrix mixer or a hybrid layer in its place (`mixer`)."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.rope = config.rope_of(layer_idx)
        if self.layer_type in ("linear_attention", "hybrid"):
            self.mixer = make_mixer(config, layer_idx)
        elif self.layer_type == RECURRENT:
            from .recurrent import RecurrentMixer

            self.recurrent = RecurrentMixer(config, layer_idx)
        else:
            self.self_attn = SoftmaxAttention(config, layer_idx)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Refuse tensors of a teacher's attention, as of its adapters, that PEFT would leave out in silence."""
        if "self_attn" not in self._modules and any(name.startswith(f"{prefix}self_attn.") for name in state_dict):
            raise ValueError(
                f"{prefix}self_attn is not in this hybrid, whose teacher has it: merge an adapter into the teacher "
                "before the conversion, or train one for the hybrid."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def attention(self) -> nn.Module:
        """The teacher's attention, or its module with a state, of whose results the first is the output."""
        return self.recurrent if self.layer_type == RECURRENT else self.self_attn

    def mix(
        self,
        hidden_states: torch.Tensor,
        masks: dict[str, torch.Tensor | None],
        position_embeddings: dict[str, Rotary],
        seq_idx: torch.Tensor | None,
        cache: Cache | None,
        **kwargs,
    ) -> torch.Tensor:
        """The sequence mixer's output (B, L, D) for its input (B, L, D)."""
        mask = masks[self.layer_type]
        position_embeddings = position_embeddings[self.rope]
        if self.layer_type == RECURRENT:
            return self.recurrent(hidden_states, mask, seq_idx, cache)[0]
        if self.layer_type == "linear_attention":
            return self.mixer(hidden_states, position_embeddings, mask, seq_idx, cache)
        if self.layer_type == "hybrid":
            return self.mixer(hidden_states, position_embeddings, mask.of_layer(self.rope), cache, **kwargs)
        return self.self_attn(hidden_states, position_embeddings, mask, cache, **kwargs)[0]


class HybridPreTrainedModel(PreTrainedModel):
    """Flags and weight initialisation."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = False  # states can be cropped: see hybrid_cache.py
    _can_record_outputs = {
        "hidden_states": HybridDecoderLayer,
        "attentions": OutputRecorder(SoftmaxAttention, index=1),
    }

    def __init__(self, config, *args, **kwargs):
        if config.attn_logit_softcapping is not None or config.learned_sinks:
            self._supports_sdpa = False  # which has neither, so that eager is the default
        if config.learned_sinks:
            self._supports_flash_attn = False  # of which some versions leave them out without a word
        if RECURRENT in config.layer_types:
            self._is_stateful = True  # such a state cannot be cropped, and assisted generation is refused
        warn_if_newer()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a model as transformers does, and freeze again what it has made trainable by loading."""
        loaded = super().from_pretrained(*args, **kwargs)
        # with output_loading_info a report stands beside the model
        freeze_fixed(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @staticmethod
    def create_masks_for_generate(config, attention_mask=None, **kwargs):
        """Masks that `generate` makes ahead, for static caches; the padding itself where hybrid layers need it."""
        if {"hybrid", RECURRENT} & set(config.layer_types):
            return drop_full_mask(attention_mask)
        masks = create_masks_for_generate(config=config, attention_mask=attention_mask, **kwargs)
        # a dictionary of one mask that is None is more than peft can add a learned prompt to
        if set(config.layer_types) == {"linear_attention"}:
            return masks["linear_attention"]
        return masks

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RMSNorm) and module.unit_offset:
            init.zeros_(module.weight)
        if hasattr(type(module), "initialise"):
            module.initialise()


def freeze_fixed(model: nn.Module) -> None:
    """Freeze the parameters through which no gradient passes; parallel training would wait for theirs."""
    for name, parameter in model.named_parameters():
        if name.endswith(FIXED):
            parameter.requires_grad_(False)


class ScaledEmbedding(nn.Embedding):
    """An embedding times a factor, which is rounded to the weight's type first, as Gemma's is."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.multiplier = config.embedding_multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input)
        if self.multiplier == 1:
            return embedded
        return embedded * torch.tensor(self.multiplier, dtype=embedded.dtype)


class HybridModel(HybridPreTrainedModel):
    """Embedding, blocks, final norm. A family names the class of its blocks, and makes that norm."""

    layer_class: type[HybridDecoderLayer]
    make_norm: Callable[..., nn.Module]

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config)
        self.embed_dropout = nn.Dropout(config.embd_pdrop)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = self.make_norm(config)
        self.rotary_emb = rotary_embedding(config)
        self.local_rotary_emb = local_rotary_embedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> HybridOutput:
        """Hidden states after the final norm.

        Args:
            input_ids: (B, L); or inputs_embeds: (B, L, D).
            attention_mask: (B, past + L), 0 at padding; or what `generate` prepared.
            position_ids: (B, L) or (1, L). Where they restart without a mask or a past, sequences are packed.
            cache: cache to continue from; `use_cache` makes one when there is none. past_key_values: its older name.
            seq_idx: (B, L) ids of packed sequences. cu_seqlens: (number of sequences + 1,) their offsets; the
                `cu_seq_lens_q` of transformers' flattening collator is read the same way.

            output_attentions: return the probabilities of the layers that keep their attention, in order.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds were given; attention probabilities are asked
                of a model that has none; or an argument is given that the model does not follow.
        """
        cache = one_cache(cache, past_key_values)
        self._check_keywords(kwargs, cache)
        if kwargs.get("output_attentions") or self.config.output_attentions:
            self._check_attentions()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        shape = tuple(inputs_embeds.shape[:2])
        attention_mask = drop_full_mask(attention_mask)
        mask_2d = None
        if is_padding_mask(attention_mask):
            mask_2d = attention_mask
        lengths = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is not None and lengths is not None:
            raise ValueError("cu_seqlens and cu_seq_lens_q are two names of one argument; pass one of them.")
        if kwargs.get("output_router_logits") and getattr(self.config, "num_experts", None) is None:
            raise ValueError("This model has no experts, and so no router logits: leave out output_router_logits.")
        cu_seqlens = lengths if cu_seqlens is None else cu_seqlens
        seq_idx = packed_sequence_ids(position_ids, seq_idx, cu_seqlens, shape, mask_2d, cache)
        if use_cache and cache is None and seq_idx is None:
            cache = new_cache(self.config)
        fit_cache(cache, self.config)
        past_length = cache_length(cache)
        if position_ids is None and seq_idx is not None:
            position_ids = positions_in_sequence(seq_idx)
        elif position_ids is None:
            position_ids = torch.arange(shape[1], device=inputs_embeds.device)[None] + past_length
        masks = self._masks(inputs_embeds, attention_mask, mask_2d, cache, position_ids, seq_idx)
        position_embeddings = self.rotary(inputs_embeds, position_ids)
        hidden_states = self.embed_dropout(inputs_embeds)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                masks=masks,
                position_embeddings=position_embeddings,
                seq_idx=seq_idx,
                cache=cache,
                position_ids=position_ids,
                **kwargs,
            )
        note_length(cache, past_length + shape[1])
        return HybridOutput(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache})

    def _check_keywords(self, given: dict[str, Any], cache: Cache | None) -> None:
        """Refuse what would change a result and is not followed: arguments by name, and a cache filled twice.

        Raises:
            ValueError: naming the argument.
        """
        unknown = [name for name in given if name not in (*FOLLOWED, *WITHOUT_EFFECT) and given[name] is not None]
        if given.get("is_causal") is True:
            unknown.remove("is_causal")
        if unknown:
            raise ValueError(f"This model does not follow {', '.join(unknown)}; leave it out.")
        if given.get("cu_seq_lens_k") is not None and given.get("cu_seq_lens_q") is None:
            raise ValueError("cu_seq_lens_k packs sequences only beside cu_seq_lens_q; pass both.")
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "With gradient checkpointing layers are computed twice and would enter their tokens into the cache "
                "twice; pass no cache, or call gradient_checkpointing_disable()."
            )

    def _check_attentions(self) -> None:
        """Warn that layers have no attention probabilities to return; refuse where none has.

        Raises:
            ValueError: no layer keeps its attention.
        """
        layers = len(self.config.layer_types)
        without = ("linear_attention", "hybrid", RECURRENT)
        replaced = sum(kind in without for kind in self.config.layer_types)
        if replaced == layers:
            raise ValueError("output_attentions: no layer of this model has a matrix of attention probabilities.")
        if replaced:
            logger.warning_once(
                f"output_attentions: {replaced} of {layers} layers are mixers or hybrid layers, or hold the teacher's "
                "own state, and have no matrix of attention probabilities; those of the other layers are returned, in "
                "order."
            )

    def rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Rotary]:
        """The embedding for each kind of layer in `layer_rope`."""
        found = {"main": self.rotary_emb(like, position_ids)}
        scale = query_scale(self.config.rope_parameters, position_ids, like.dtype)
        if self.local_rotary_emb is not None:
            found["local"] = self.local_rotary_emb(like, position_ids)
        if "none" in (self.config.layer_rope or ()):
            cos, sin = found["main"]
            # an angle of zero turns nothing, so that layers without positions take the same way
            found["none"] = torch.ones_like(cos), torch.zeros_like(sin)
        if scale is not None:
            found["main"] = (*found["main"], scale)
        return found

    def _masks(self, inputs_embeds, attention_mask, mask_2d, cache, position_ids, seq_idx):
        """One mask per layer type that occurs."""
        if isinstance(attention_mask, dict):
            if missing := set(self.config.layer_types) - attention_mask.keys():
                raise ValueError(
                    f"attention_mask has no mask for {' and '.join(sorted(missing))}; pass a mask (B, L) of padding."
                )
            return attention_mask
        replaced = {"linear_attention", "hybrid", RECURRENT} & set(self.config.layer_types)
        if attention_mask is not None and mask_2d is None and replaced:
            raise ValueError(
                "Layers with a state cannot follow an attention mask of 4 dimensions; pass a mask (B, L) of padding, "
                "and position_ids, seq_idx or cu_seqlens for packed sequences."
            )
        padding_mask = None
        given_positions = position_ids
        if mask_2d is not None and {"linear_attention", RECURRENT} & set(self.config.layer_types):
            # A single token may be padding, too, where a prompt is fed token by token.
            padding_mask = mask_2d[:, -inputs_embeds.shape[1] :]
            if padding_mask.shape != mask_2d.shape:  # else it is known to have padding
                padding_mask = drop_full_mask(padding_mask)
        if seq_idx is not None:
            # transformers finds packed sequences by restarting positions and only without a mask: padding becomes a
            # sequence of its own, and the positions those of the sequences, whatever the caller numbered.
            if mask_2d is not None:
                seq_idx = seq_idx.masked_fill(mask_2d == 0, -1)
            position_ids = positions_in_sequence(seq_idx)
            attention_mask = None
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        full_heads = any(self.config.hybrid_full_heads or ())
        masks = {
            layer_type: make(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE_NAME: cache},
            )
            for layer_type, make in makers.items()
            if layer_type in self.config.layer_types or (layer_type == "full_attention" and full_heads)
        }
        masks |= dict.fromkeys(("linear_attention", RECURRENT), padding_mask)
        if "hybrid" in self.config.layer_types:
            past = cache_length(cache)
            index = token_index(inputs_embeds.shape[:2], mask_2d, seq_idx, past, inputs_embeds.device)
            start = None
            certain = isinstance(past, int) and (past == 0 or not is_torchdynamo_compiling())
            if mask_2d is None and seq_idx is None and certain:
                start = past
            columns = index.shape[1] + (past if isinstance(past, int) else cache.get_max_length())
            sink_rotary = self.sink_rotary(inputs_embeds, given_positions, index, columns)
            masks["hybrid"] = HybridInputs(index, start, seq_idx, sink_rotary, masks.get("full_attention"))
        return masks

    def sink_rotary(
        self, like: torch.Tensor, position_ids: torch.Tensor, index: torch.Tensor, columns: int
    ) -> dict[str, Rotary] | None:
        """The embedding for queries that attend to sinks, none of them farther away than the teacher was trained for.

        Args:
            like: a tensor of the type and on the device of the result. index: (B, L), all below `columns`.
        """
        embeddings = (self.rotary_emb, self.local_rotary_emb)
        if any(e is not None and e.rope_type in LENGTH_DEPENDENT_ROTARY for e in embeddings):
            return None
        if columns <= self.config.hybrid_sink_reach:
            return None
        too_far = (index - self.config.hybrid_sink_reach).clamp(min=0)
        return self.rotary(like, position_ids - too_far)
