"""The parts of a hybrid model that do not depend on the block: initialisation, masks, caches, the decoder loop, loss.

A family subclasses these and defines its blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.masking_utils import (
    create_causal_mask,
    create_masks_for_generate,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_torchdynamo_compiling, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..compatibility import (
    CACHE_NAME,
    OLD_CACHE_NAME,
    HybridCausalLMOutput,
    HybridOutput,
    cache_of,
    check_drafts,
    forget_tokens,
    one_cache,
    renamed_cache,
    warn_if_newer,
)
from ..hybrid.cache_checkpoint import CacheCheckpoint
from ..hybrid.hybrid_attention import HybridAttention, HybridInputs, theory_mass
from ..hybrid.hybrid_cache import (
    RecurrentCache,
    cache_length,
    fit_cache,
    has_attention_layer,
    new_cache,
    note_length,
)
from ..mixers.mamba1 import Mamba1
from ..mixers.mamba2 import DiscreteMamba2, Mamba2
from ..mixers.matrix_mixer import OPEN_GATE
from ..mixers.mixers import make_mixer
from ..mixers.short_conv import ShortConv
from ..mixers.ssd import sequence_starts
from .attention import SoftmaxAttention
from .hybrid_config import RECURRENT
from .norms import RMSNorm
from .recurrent import RecurrentMixer
from .rotary import Rotary, local_rotary_embedding, query_scale, rotary_embedding

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
            self.recurrent = RecurrentMixer(config, layer_idx)
        else:
            self.self_attn = SoftmaxAttention(config, layer_idx)

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
            return _drop_full_mask(attention_mask)
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
        if isinstance(module, ShortConv):
            # identity: the last tap is the current token
            init.zeros_(module.bias)
            identity = torch.zeros_like(module.weight)
            identity[..., -1] = 1.0
            init.copy_(module.weight, identity)
        if isinstance(module, RecurrentMixer):
            module.initialise()
        if isinstance(module, DiscreteMamba2 | Mamba2 | Mamba1):
            init.ones_(module.D)
            if module.z_bias is not None:
                init.constant_(module.z_bias, OPEN_GATE)
        if isinstance(module, HybridAttention | SoftmaxAttention) and module.sinks is not None:
            init.normal_(module.sinks, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, HybridAttention | SoftmaxAttention) and module.key_offset is not None:
            init.zeros_(module.key_offset)
        if isinstance(module, HybridAttention):
            if module.mass is not None:
                init.copy_(module.mass, theory_mass(module.config, module.layer_idx).to(module.mass))
            if module.up is not None:
                init.zeros_(module.up.weight)
            if module.salience is not None:
                init.zeros_(module.salience)
        if isinstance(module, DiscreteMamba2) and module.A_log_bias is not None:
            init.zeros_(module.A_log_bias)
        if isinstance(module, Mamba2):
            init.copy_(module.dt_bias, _inverse_softplus_step(module.dt_bias))
            # rates from 1 to 16, as the code of Mamba-2 draws them
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log())
        if isinstance(module, Mamba1):
            init.copy_(module.dt_proj.bias, _inverse_softplus_step(module.dt_proj.bias))
            # rates 1, 2, ... N in each channel, as in the code of Mamba (S4D-real)
            states = torch.arange(1, module.d_state + 1, dtype=torch.float32, device=module.A_log.device)
            init.copy_(module.A_log, states.log().expand_as(module.A_log))


def freeze_fixed(model: nn.Module) -> None:
    """Freeze the parameters through which no gradient passes; parallel training would wait for theirs."""
    for name, parameter in model.named_parameters():
        if name.endswith(FIXED):
            parameter.requires_grad_(False)


def _inverse_softplus_step(like: torch.Tensor) -> torch.Tensor:
    """Step sizes log-uniform in [1e-3, 1e-1], as Mamba draws them, before the softplus."""
    dt = torch.empty_like(like, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
    return dt + torch.log(-torch.expm1(-dt))


def packed_sequence_ids(
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    batch_shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
) -> torch.Tensor | None:
    """(B, L) ids of the packed sequences, from whichever of the three forms was given; None when nothing is packed.

    Restarting `position_ids` count in a forward without a cache, and between tokens that are not padding.

    Raises:
        ValueError: `cu_seqlens` does not describe this batch, or a packed batch comes with a cache.
    """
    if cache is not None:
        if seq_idx is not None or cu_seqlens is not None:
            raise ValueError("Packed sequences leave no single state to continue from: pass no cache.")
        return None
    if seq_idx is not None:
        return seq_idx.expand(batch_shape)
    if cu_seqlens is not None:
        num_tokens = batch_shape[0] * batch_shape[1]
        if batch_shape[0] != 1 or (not torch.compiler.is_compiling() and int(cu_seqlens[-1]) != num_tokens):
            raise ValueError(f"cu_seqlens packs one row of {num_tokens} tokens; got a batch of shape {batch_shape}.")
        positions = torch.arange(batch_shape[1], device=cu_seqlens.device)
        return torch.bucketize(positions, cu_seqlens[1:], right=True)[None].int()
    if position_ids is None or (attention_mask is not None and attention_mask.shape != batch_shape):
        return None
    restarts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1
    if attention_mask is not None:
        real = attention_mask.bool()
        restarts = restarts & real & torch.nn.functional.pad(real[:, :-1], (1, 0))
    if not is_torchdynamo_compiling() and not restarts.any():
        return None
    return restarts.cumsum(-1, dtype=torch.int32).expand(batch_shape)


def positions_in_sequence(seq_idx: torch.Tensor) -> torch.Tensor:
    """Position of each token within its packed sequence, (B, L)."""
    index = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand(seq_idx.shape)
    return index - torch.where(sequence_starts(seq_idx), index, 0).cummax(dim=1).values


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


def finish_logits(logits: torch.Tensor, config) -> torch.Tensor:
    """Scale and cap what the head gives, as a configuration says: a hybrid's, or one of transformers'."""
    scaling = getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    if scaling != 1:
        logits = logits / scaling
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap)


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
        attention_mask = _drop_full_mask(attention_mask)
        mask_2d = None
        if _is_padding_mask(attention_mask):
            mask_2d = attention_mask
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
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
                padding_mask = _drop_full_mask(padding_mask)
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
            index = token_index(inputs_embeds.shape[:2], mask_2d, seq_idx, cache, inputs_embeds.device)
            past = cache_length(cache)
            start = None
            certain = isinstance(past, int) and (past == 0 or not is_torchdynamo_compiling())
            if mask_2d is None and seq_idx is None and certain:
                start = past
            columns = index.shape[1] + (past if isinstance(past, int) else cache.get_max_length())
            sink_rotary = self._sink_rotary(inputs_embeds, given_positions, index, columns)
            masks["hybrid"] = HybridInputs(index, start, seq_idx, sink_rotary, masks.get("full_attention"))
        return masks

    def _sink_rotary(self, inputs_embeds, position_ids, index, columns):
        """The embedding for queries that attend to sinks, none of them farther away than the teacher was trained for.

        Args:
            index: (B, L), all below `columns`.
        """
        embeddings = (self.rotary_emb, self.local_rotary_emb)
        if any(e is not None and e.rope_type in LENGTH_DEPENDENT_ROTARY for e in embeddings):
            return None
        if columns <= self.config.hybrid_sink_reach:
            return None
        too_far = (index - self.config.hybrid_sink_reach).clamp(min=0)
        return self.rotary(inputs_embeds, position_ids - too_far)


def token_index(shape, mask_2d, seq_idx, cache, device) -> torch.Tensor:
    """(B, L) index of each token in its own sequence, what the cache has seen included; -1 at padding."""
    if seq_idx is not None:
        if mask_2d is None:
            return positions_in_sequence(seq_idx)
        real = mask_2d.long()
        before = real.cumsum(1) - real
        at_start = torch.where(sequence_starts(seq_idx), before, 0).cummax(dim=1).values
        return (before - at_start).masked_fill(real == 0, -1)
    if mask_2d is not None:
        return (mask_2d.long().cumsum(1) - 1).masked_fill(mask_2d == 0, -1)[:, -shape[1] :]
    return (torch.arange(shape[1], device=device) + cache_length(cache)).expand(tuple(shape))


def _may_ask(t: torch.Tensor) -> bool:
    """Return True if code may branch on a tensor's values: not while compiling, nor on the meta device."""
    return not is_torchdynamo_compiling() and t.device.type != "meta"


def _is_padding_mask(attention_mask) -> bool:
    """Return True for a mask (B, L) of the tokens that are no padding, not one that `generate` prepared."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2


def _drop_full_mask(attention_mask):
    """Return None for a mask of ones: transformers finds packed sequences only if there is no mask."""
    if _is_padding_mask(attention_mask) and _may_ask(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """Language model head on a hybrid. A family names the hybrid's class and, if it has experts, `router_loss`."""

    model_class: type[HybridModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init_subclass__(cls, **options):
        """Note the class where a Trainer looks up by name whether smoothed labels are to be shifted."""
        super().__init_subclass__(**options)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.config_class.model_type] = cls.__name__

    def __init__(self, config):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def new_cache(self) -> Cache:
        """An empty cache for this model."""
        return new_cache(self.config)

    def cache_checkpoint(self, cache: Cache) -> CacheCheckpoint:
        """The cache after the tokens so far, to which `restore(cache)` takes it back when it has gone on."""
        return CacheCheckpoint(cache)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        shift_labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> HybridCausalLMOutput:
        """Logits (B, L or logits_to_keep, vocab), and the shifted cross entropy when `labels` (B, L) are given.

        The other arguments are those of the base model; labels of -100 are ignored, and `shift_labels` are labels that
        are shifted already.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = finish_logits(self.lm_head(outputs.last_hidden_state[:, logits_to_keep]), self.config)
        loss = aux_loss = None
        if labels is not None or shift_labels is not None:
            kwargs |= {"shift_labels": shift_labels, "vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, labels=labels, **kwargs)
        if outputs.router_logits:
            aux_loss = self.router_loss(outputs.router_logits, attention_mask)
        if aux_loss is not None and loss is not None:
            loss = loss + self.config.router_aux_loss_coef * aux_loss
        return HybridCausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            **{CACHE_NAME: cache_of(outputs)},
        )

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        return super().generate(*args, **renamed_cache(kwargs))

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """Prepare a step of `generate`; the one that leaves LongRoPE's short factors reads all tokens again.

        As transformers' Phi-3 does, padding counted. The cache is emptied in place, and records on if it did.

        Raises:
            ValueError: these tokens are needed, and `input_ids` has the new ones alone.
        """
        cache = one_cache(cache, past_key_values)
        past = cache_length(cache)
        given = input_ids.shape[1]
        length = past + (given if next_sequence_length is None else next_sequence_length)
        for rope in (self.config.rope_parameters, self.config.local_rope_parameters):
            if rope is None or rope["rope_type"] != "longrope":
                continue
            if 0 < past <= rope["original_max_position_embeddings"] < length:
                if given < length:
                    raise ValueError(
                        f"LongRoPE has other factors from {length} tokens on, which reads all of them again; pass all "
                        "as input_ids, with a cache or without, and no prefill_chunk_size."
                    )
                forget_tokens(cache)
                past = 0
                next_sequence_length = None
        kwargs |= {"next_sequence_length": next_sequence_length, "inputs_embeds": inputs_embeds, CACHE_NAME: cache}
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if CACHE_NAME in inputs:
            # PEFT 0.21 looks for it by this name, or else puts a learned prompt before each token
            inputs[OLD_CACHE_NAME] = inputs.pop(CACHE_NAME)
        return inputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        if generation_config.cache_implementation == "quantized":
            raise ValueError(
                "A hybrid needs no cache_implementation='quantized': the bits of its cache are in its configuration "
                f"(full_attention_bits {self.config.full_attention_bits}, window_bits {self.config.window_bits}); "
                "leave it out."
            )
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit: a hybrid's cache has all of its layers, so it cannot draft with the first; "
                "use prompt_lookup_num_tokens or an assistant_model."
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            check_drafts()
        given = model_kwargs.get(CACHE_NAME)
        if isinstance(given, Cache):
            fit_cache(given, self.config)
            if given.layers and not has_attention_layer(given) and not isinstance(given, RecurrentCache):
                raise ValueError(
                    f"This model has no attention layer, and {type(given).__name__} cannot count tokens without one; "
                    "pass the cache that the model itself returned, a DynamicCache, or none."
                )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        # before 5.24 transformers calls the cache of any class with "mamba" in its name `cache_params`
        if "cache_params" in model_kwargs:
            prepared = model_kwargs.pop("cache_params")
            model_kwargs.setdefault(CACHE_NAME, prepared)
        cache = model_kwargs.get(CACHE_NAME)
        if not isinstance(cache, Cache) or cache is given:
            return
        if cache.layers and not has_attention_layer(cache):
            cache = model_kwargs[CACHE_NAME] = self.new_cache()
        fit_cache(cache, self.config)  # before `generate` asks whether it can be compiled
        if generation_config.is_assistant:
            cache.activate_past_recording()


class HybridForSequenceClassification(GenericForSequenceClassification, HybridPreTrainedModel):
    """Scores of a text from its last token that is not padding, as for reward models. A family names its hybrid."""

    model_class: type[HybridModel]

    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)  # whose own takes models of transformers alone
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
