"""The teacher as a model of the hybrid's own class, every layer attention, whole or one block at a time.

With every layer kept, the hybrid's class computes the teacher exactly (the tests compare logits), so alignment needs
no class per teacher family, and a block can hold the attention it has and the mixer it is to have side by side.

Shapes: B batch, L length, D model width, H heads, Q queries.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig

from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.inputs import unpadded
from modeling_llamba.model.attention import probabilities
from modeling_llamba.model.mixer import make_mixer
from modeling_llamba.model.rotary import Rotary, local_rotary_embedding, rotary_embedding, rotate_keys, rotate_queries

from ..hybrids.shapes import model_class
from ..io.reader import Checkpoint
from ..io.rules import Rule, rule_of
from ..options import MixerOptions, PlacementOptions
from ..teachers.weights import TeacherWeights


def usable_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: this machine does not have it.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name} cannot be used here: {str(error).splitlines()[0]}") from error


class TeacherModel:
    """Embedding, blocks, norm and head of the teacher, loaded when they are asked for; of the blocks, one at a time.

    Args:
        weights: the teacher's tensors.
        device: the device to run on.
        initial_decay, seed: how tensors of mixers are initialised that the teacher says nothing about.
        context: tokens of the texts that the hybrid is made for.
    """

    mixer_config: PreTrainedConfig | None = None
    """A configuration of the hybrid, from which `mixer` makes the mixers of its replaced layers."""

    def __init__(
        self,
        weights: TeacherWeights,
        device: str = "cpu",
        initial_decay: float = MixerOptions.initial_decay,
        seed: int = 0,
        context: int = PlacementOptions.context,
    ):
        self.device = usable_device(device)
        self.weights = weights
        self.initial_decay = initial_decay
        self.seed = seed
        self.context = context
        self._mean_rotary: dict[str, Rotary] = {}
        self.checkpoint = weights.checkpoint
        self.config = weights.config
        self._is_whole = False
        # without memory: a part is filled when it is asked for
        with torch.device("meta"):
            self.model = model_class(self.config.model_type)(self.config).eval().requires_grad_(False)
        self.model.model.rotary_emb = rotary_embedding(self.config).to(self.device)
        if self.model.model.local_rotary_emb is not None:
            self.model.model.local_rotary_emb = local_rotary_embedding(self.config).to(self.device)

    def follow(self, mixer_config: PreTrainedConfig) -> None:
        """Make mixers by this configuration from now on."""
        if mixer_config.hybrid_window is None and self.weights.has_out_bias and not mixer_config.mixer_out_bias:
            raise ValueError(
                "This teacher has a bias on o_proj, and a mixer without one (out_bias: false) leaves it to the MLP, "
                "where it cannot be fitted: map only (--align none), or leave out_bias out."
            )
        # a mixer is also run outside of any model, and heads with full attention look here for how to compute it
        mixer_config._attn_implementation = self.model.config._attn_implementation
        self.mixer_config = mixer_config

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.config.num_hidden_layers

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) -> (B, L, D)."""
        return self._loaded("model.embed_tokens")(ids.to(self.device))

    def block(self, layer: int) -> nn.Module:
        """Block `layer` with its attention; unless the teacher is whole, all else is let go."""
        model = self.model.model
        for other in () if self._is_whole else (model.embed_tokens, *model.layers):
            if other is not model.layers[layer] and not _is_meta(other):
                other.to("meta")
        return self._loaded(f"model.layers.{layer}")

    def whole(self) -> nn.Module:
        """The causal language model with everything loaded, from now on."""
        self._is_whole = True
        self._loaded("model.embed_tokens")
        for layer in range(self.num_layers):
            self._loaded(f"model.layers.{layer}")
        self._loaded("model.norm")
        if self.config.tie_word_embeddings:
            # loading it by its own name would hold the embedding twice
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
            if self.model.lm_head.bias is not None:
                self._fill("lm_head.bias")
        else:
            self._loaded("lm_head")
        return self.model

    def mixer(self, layer: int) -> nn.Module:
        """A new mixer for `layer`, the teacher's weights mapped onto it, in float32 and trainable."""
        mixer = make_mixer(self.mixer_config, layer)
        of_mixer = self.weights.mixer_rules(self.mixer_config, layer, self.initial_decay, self.seed)
        rules = {rule.target: rule for rule in of_mixer}
        with torch.no_grad():
            for name, tensor in mixer.state_dict().items():
                tensor.copy_(tensor_of(rules[f"model.layers.{layer}.mixer.{name}"], self.checkpoint))
        return mixer.to(self.device)

    def rotary(self, length: int, layer: int) -> Rotary:
        """The rotary embedding of a layer in rows of this length."""
        return self._rotary(length)[self.config.rope_of(layer)]

    def mean_rotary(self, layer: int) -> Rotary:
        """Means of a layer's rotary embedding over the positions of a context, (1, 1, rotary dims) each: cos, sin, and
        the length that both have at one position."""
        kind = self.config.rope_of(layer)
        if kind not in self._mean_rotary:
            model = self.model.model
            # a copy, since some kinds change with the longest position that they have seen
            embedding = copy.deepcopy(model.local_rotary_emb if kind == "local" else model.rotary_emb)
            positions = torch.arange(self.context, device=self.device)[None]
            cos, sin = embedding(torch.zeros(1, device=self.device), positions)
            if kind == "none":
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            at_one = torch.hypot(cos[:, :1], sin[:, :1])
            self._mean_rotary[kind] = cos.mean(1, keepdim=True), sin.mean(1, keepdim=True), at_one
        return self._mean_rotary[kind]

    def _rotary(self, length: int) -> dict[str, Rotary]:
        positions = torch.arange(length, device=self.device)[None]
        # of the first tensor only type and device are read
        return self.model.model.rotary(torch.zeros(1, device=self.device), positions)

    def block_inputs(self, hidden: torch.Tensor) -> dict:
        """The keyword arguments every block takes, for unpadded rows (B, L, D)."""
        # without position ids: checking them for restarts would make the host wait for the device
        return {
            "masks": self.model.model._masks(hidden, None, None, None, None, None) | {"hybrid": unpadded(hidden)},
            "position_embeddings": self._rotary(hidden.shape[1]),
            "seq_idx": None,
            "cache": None,
        }

    def _loaded(self, name: str) -> nn.Module:
        module = self.model.get_submodule(name)
        if _is_meta(module):
            module.to_empty(device=self.device)
            for tensor_name in module.state_dict():
                self._fill(f"{name}.{tensor_name}")
        return module

    @torch.no_grad()
    def _fill(self, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        # scaled, since layers are also tried with a rounded cache
        source = self.weights.scaled_sources[name]
        value = tensor_of(rule_of(name, source), self.checkpoint).to(self.device, torch.float32)
        if isinstance(getattr(module, leaf), nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        setattr(module, leaf, value)


def layer_type(mixer: nn.Module) -> str:
    """The type of layer that holds this mixer."""
    return "hybrid" if isinstance(mixer, HybridAttention) else "linear_attention"


def tensor_of(rule: Rule, checkpoint: Checkpoint) -> torch.Tensor:
    """Compute the tensor that a rule writes, in float32."""
    value = torch.empty(math.prod(rule.shape))
    done = 0
    for block in rule.blocks(checkpoint):
        value[done : done + block.numel()] = block.reshape(-1)
        done += block.numel()
    assert done == value.numel(), f"{rule.target}: {done} values of {value.numel()}"
    return value.view(rule.shape)


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


@torch.no_grad()
def attention_rows(
    attention: nn.Module, u: torch.Tensor, rotary: Rotary, tile: int, first: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The teacher's probabilities (B, H, Q, L) in float32, a tile of rows at a time, causal and within its window.

    Args:
        u: (B, L, D). first: the row to begin with.
    """
    query, key, _ = attention.project_heads(u)
    query, key = rotate_queries(query, rotary), rotate_keys(key, rotary)
    key = key.repeat_interleave(attention.num_key_value_groups, dim=1)
    position = torch.arange(u.shape[1], device=u.device)
    for start in range(first, u.shape[1], tile):
        rows = slice(start, min(start + tile, u.shape[1]))
        distance = position[rows, None] - position
        hidden = distance < 0
        if attention.sliding_window is not None:
            hidden = hidden | (distance >= attention.sliding_window)
        scores = query[:, :, rows] @ key.transpose(-1, -2) * attention.scaling
        if attention.softcap is not None:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        yield rows, probabilities(scores.masked_fill(hidden, float("-inf")), attention.sinks)


@contextmanager
def replaced(model: nn.Module, mixers: dict[int, nn.Module]) -> Iterator[nn.Module]:
    """The all-attention model with `mixers` in place of those layers' attention, inside the block."""
    layers = model.model.layers
    before = {layer: layers[layer].layer_type for layer in mixers}
    for layer, mixer in mixers.items():
        layers[layer].mixer = mixer
        layers[layer].layer_type = layer_type(mixer)
    try:
        yield model
    finally:
        for layer, kind in before.items():
            del layers[layer].mixer
            layers[layer].layer_type = kind
