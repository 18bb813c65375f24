"""A language model, and a classifier, on a hybrid.

A family subclasses these and names its hybrid.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.generic import can_return_tuple

from ..compatibility import (
    CACHE_NAME,
    OLD_CACHE_NAME,
    HybridCausalLMOutput,
    cache_of,
    check_drafts,
    forget_tokens,
    one_cache,
    renamed_cache,
)
from ..hybrid.cache_checkpoint import CacheCheckpoint
from .cache import RecurrentCache, cache_length, fit_cache, has_attention_layer, new_cache
from .cuda_graphs import NOT_RECORDED, passes_of_a_call, run_as_graph, take_passes, takes_token
from .hybrid_model import HybridModel, HybridPreTrainedModel
from .prompt_graphs import forget_graphs


def finish_logits(logits: torch.Tensor, config) -> torch.Tensor:
    """Scale and cap what the head gives, as a configuration says: a hybrid's, or one of transformers'."""
    scaling = getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    if scaling != 1:
        logits = logits / scaling
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap)


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

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocab) of hidden states (..., D) after the final norm."""
        return finish_logits(self.lm_head(hidden_states), self.config)

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
        cache = one_cache(cache, past_key_values)
        others = [labels, shift_labels, *(kwargs[name] for name in kwargs.keys() - {"return_dict"})]
        if not is_torchdynamo_compiling() and all(value is None or value is False for value in others):
            found = run_as_graph(self, input_ids, attention_mask, cache)
            if found is not None:
                return HybridCausalLMOutput(logits=found, **{CACHE_NAME: cache})
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.logits_of(outputs.last_hidden_state[:, logits_to_keep])
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

    def train(self, mode: bool = True):
        """Turn training on or off, like PyTorch's; training gets the memory of CUDA graphs."""
        if mode:
            forget_graphs(self)
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        forget_graphs(self)  # whose weights are about to be moved or converted
        return super()._apply(fn, recurse)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        kwargs = renamed_cache(kwargs)
        if kwargs.keys() & NOT_RECORDED:
            return super().generate(*args, **kwargs)
        with passes_of_a_call():
            return super().generate(*args, **kwargs)

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
        if takes_token(cache, next_sequence_length):
            return {"input_ids": input_ids[:, -1:], OLD_CACHE_NAME: cache}
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
        self._prepare_cache(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        take_passes(self, generation_config, generation_mode, model_kwargs.get(CACHE_NAME))

    def _prepare_cache(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
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
