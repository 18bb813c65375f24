"""What a layer carries from step to step, in the slots that vLLM gives to requests.

A mixer, a window, sinks and places have a constant size, so a request has one slot of each layer: to vLLM it is the
state of a Mamba layer. vLLM runs the tokens of all requests as one row: first a token each of those that decode, then
the prompts that are read, or parts of them. Those that decode are one batch here, each prompt is a batch of its own.
`SlotCache` is the cache that the layer's code continues from and writes to.

The window is a ring: token t is in column t mod W, so that a step writes one column.

Shapes: B requests, L tokens, H query heads, K key/value heads, D head dim, S sinks, R places, W window; T, G, P, N as
in the mixers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from modeling_llamba.normalised_read import NormalisedRead
from modeling_llamba.window_attention import Near, Projected, Tokens, WindowAttention, WindowInputs

Rotary = tuple[torch.Tensor, torch.Tensor]
State = dict[str, tuple[tuple[int, ...], torch.dtype]]


def state_of(config, layer: int, dtype: torch.dtype) -> State:
    """Shape and type of each tensor in a slot of a layer that is not plain attention, the widest types first.

    Args:
        dtype: of the weights.
    """
    wide, state = torch.float32, {}
    hybrid = config.layer_types[layer] == "hybrid"
    K, D, W = config.num_key_value_heads, config.head_dim, config.window_of(layer)
    H, G, P, N = config.mixer_num_heads, config.mixer_num_kv_heads, config.mixer_head_dim, config.mixer_d_state
    T = G if config.mixer_shared_state else H
    if hybrid:
        columns = config.hybrid_sinks + config.hybrid_salient + W
        state["keys"] = state["values"] = (K, columns, D), dtype
        if config.hybrid_salient:
            state["salience"] = (config.hybrid_salient + W,), wide
            state["place_index"] = (config.hybrid_salient,), torch.int32
    if hybrid and config.hybrid_read == "normalised":
        state["recurrent"] = (K, D + 1, config.state_keys(layer) + 1), wide
    elif config.mixer != "none":
        state["conv"] = (G * (P + N) + H * N, config.mixer_d_conv), dtype
        state["recurrent"] = (T, P, N), wide
        if hybrid and config.mixer_sees == "beyond":
            stepped = config.mixer == "mamba2"
            state["late_x"] = (W, T if stepped else G, P), wide if stepped else dtype
            state["late_log_a"] = (W, T), wide
            state["late_B"] = (W, T if stepped else G, N), dtype
    return dict(sorted(state.items(), key=lambda item: -item[1][1].itemsize))


def slot_shape(state: State) -> tuple[tuple[int, ...], ...]:
    """A slot as vLLM sees it: one row of float32."""
    return ((-(-sum(prod(shape) * dtype.itemsize for shape, dtype in state.values()) // 4),),)


LATE = ("late_x", "late_log_a", "late_B")


class SlotCache:
    """A layer's state of some requests: the cache, and at once its only layer, as the layer's code sees them.

    Args:
        slots: the tensors of all slots by name, (slots, ...) each. which: those of the requests, (B,) or a slice.
        begun: whether the requests have begun; if not, what the slots hold is of others.
    """

    since, recorded = 0, None

    def __init__(self, slots: dict[str, torch.Tensor], which: torch.Tensor | slice, begun: bool):
        self.slots, self.which = slots, which
        self.has_previous_state = {0: begun}
        names = [name for name in ("conv", "recurrent", *LATE) if begun and name in slots]
        self.held = {name: slots[name][which] for name in names}
        self.conv_states, self.recurrent_states = {0: self.held.get("conv")}, {0: self.held.get("recurrent")}
        self.leaving = tuple(self.held[name] for name in LATE) if LATE[0] in self.held else None

    @property
    def layers(self) -> "SlotCache":
        """What holds the layers."""
        return self

    def __getitem__(self, layer_idx: int) -> "SlotCache":
        return self

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int) -> None:
        """Take a state in the place of the former."""
        self.recurrent_states[0] = state

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, conv_kernel_size: int) -> torch.Tensor:
        """Remember the last of the inputs (B, channels, L); returns those remembered before, then the new."""
        past = self.conv_states[0]
        inputs = F.pad(new, (conv_kernel_size, 0)) if past is None else torch.cat([past, new], dim=-1)
        self.conv_states[0] = inputs[..., -conv_kernel_size:]
        return inputs

    def write(self) -> None:
        """Put what the layer has left here into the slots."""
        states = {"conv": self.conv_states[0], "recurrent": self.recurrent_states[0]}
        states |= dict(zip(LATE, self.leaving or (), strict=False))
        for name, state in states.items():
            # what a slice holds is the slot itself, in which a layer may have worked in place
            if name in self.slots and not (isinstance(self.which, slice) and state is self.held.get(name)):
                self.slots[name][self.which] = state.to(self.slots[name].dtype)


class PromptCache(SlotCache):
    """The state of one request whose prompt is read, window and all.

    Args:
        slot: of the request. seen: its tokens so far.
    """

    def __init__(self, slots: dict[str, torch.Tensor], slot: int, seen: int, attention: WindowAttention | None):
        super().__init__(slots, slice(slot, slot + 1), seen > 0)
        self.recent = self.first = self.salient = None
        if attention is None:
            return
        self.sinks, self.places, self.window = attention.sinks, attention.places, attention.window
        if not seen:  # so that what stands where there is no token yet is finite, and no place is taken
            for name, empty in {"keys": 0, "values": 0, "salience": -torch.inf, "place_index": -1}.items():
                if name in slots:
                    slots[name][self.which] = empty
        else:
            index = torch.arange(seen - self.window + 1, seen, device=slots["keys"].device)
            ring = self.sinks + self.places + index % self.window
            self.recent = self._tokens(ring, index.clamp(min=-1))
            sinks = torch.arange(self.sinks, device=index.device)
            self.first = self._tokens(sinks, sinks.masked_fill(sinks >= seen, -1), salient=False)
            if self.places:
                held, order = self.slots["place_index"][slot].long().sort()  # of equals the earlier one stays
                self.salient = self._tokens(self.sinks + order, held)

    def _tokens(self, columns: torch.Tensor, index: torch.Tensor, salient: bool = True) -> Tokens:
        keys, values = (self.slots[name][self.which][:, :, columns] for name in ("keys", "values"))
        salience = self.slots["salience"][self.which][:, columns - self.sinks] if self.places and salient else None
        return Tokens(keys, values, index[None], salience)

    def keep(self, context: Tokens, sinks: Tokens, new_tokens: int, salient: Tokens | None) -> None:
        """As `WindowLayer.keep`."""
        size = min(new_tokens, self.window)
        ring = self.sinks + self.places + context.index[0, -size:] % self.window
        keys, values = self.slots["keys"][self.which], self.slots["values"][self.which]
        keys[:, :, ring], values[:, :, ring] = (t[:, :, -size:] for t in context[:2])
        keys[:, :, : self.sinks], values[:, :, : self.sinks] = sinks[:2]
        if self.places:
            self.slots["salience"][self.which][:, ring - self.sinks] = context.salience[:, -size:]
            places = slice(self.sinks, self.sinks + self.places)
            keys[:, :, places], values[:, :, places] = salient[:2]
            self.slots["salience"][self.which, : self.places] = salient.salience
            self.slots["place_index"][self.which] = salient.index.int()


class Step(NamedTuple):
    """Where requests stand in their rings; the same for all layers with windows of this width.

    slots (B,). column (B,): of the new token. index (B, W): of the token in each column, -1 where there is none.
    leaving (B, 1): the column of who leaves the window after the new token, -1 where nobody does who could.
    """

    slots: torch.Tensor
    column: torch.Tensor
    index: torch.Tensor
    leaving: torch.Tensor

    @classmethod
    def at(cls, slots: torch.Tensor, position: torch.Tensor, window: int, sinks: int) -> "Step":
        """For new tokens at positions (B,)."""
        columns, last = torch.arange(window, device=position.device), position[:, None] - window + 1
        index = position[:, None] - (position[:, None] - columns) % window
        return cls(slots, position % window, index.clamp(min=-1), torch.where(last >= sinks, last % window, -1))


@dataclass
class SlotMetadata(BaseMambaAttentionMetadata):
    """vLLM's, and what would have to be asked of a device.

    prompts: (first token in the row, one after its last, tokens of the request before them) of each prompt.
    least: tokens that precede the next one of whichever request decodes and has the fewest. steps: by width of the
    window, made by the first layer that asks.
    """

    prompts: list[tuple[int, int, int]] = field(default_factory=list)
    least: int = 0
    steps: dict[int, Step] = field(default_factory=dict, init=False)

    @functools.cached_property
    def prompt_slots(self) -> list[int]:
        """The slot of each prompt; a device is asked for them once, not by every layer."""
        return self.state_indices_tensor_p.tolist()


class SlotMetadataBuilder(BaseMambaAttentionMetadataBuilder[SlotMetadata]):
    """Counts on the CPU, once for all layers of a step."""

    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False
    # prompts are gone through one by one, and decoding asks how far requests are: graphs hold what lies between layers
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False, **kwargs
    ) -> SlotMetadata:
        """What `SlotLayer` reads at each step."""
        metadata = self._compute_common_metadata(common_attn_metadata)
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        spans = [(s, e, n - (e - s)) for s, e, n in zip(ends, ends[1:], lengths, strict=False)]
        decodes, prompts = spans[: metadata.num_decodes], spans[metadata.num_decodes :]
        metadata.prompts = prompts[: metadata.num_prefills]
        metadata.least = min((seen for _, _, seen in decodes), default=0)
        return metadata


class SlotBackend(AttentionBackend):
    """Names the builder."""

    @staticmethod
    def get_name() -> str:
        return "HYBRID_SLOTS"

    @staticmethod
    def get_builder_cls() -> type[SlotMetadataBuilder]:
        return SlotMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class SlotLayer(nn.Module, MambaBase):
    """A mixer, or a hybrid layer, that continues from slots; takes the place of the layer it holds.

    Heads of a hybrid layer that see everything are vLLM's own paged attention, one of one key/value head for each, so
    that all of a model are alike: vLLM's pages of a model are of one size.

    Args:
        step: `step_window`, or `compiled_step()`, the same for all layers of a model.
    """

    def __init__(self, mixer: nn.Module, config, layer: int, vllm_config: VllmConfig, prefix: str, step: Callable):
        super().__init__()
        self.mixer, self.prefix, self.state = mixer, prefix, state_of(config, layer, vllm_config.model_config.dtype)
        self.attention: WindowAttention | None = getattr(mixer, "attention", None)
        self.paged = nn.ModuleList()
        if self.attention is not None:
            self.paged.extend(
                Attention(
                    self.attention.heads // self.attention.kv_heads,
                    self.attention.head_dim,
                    self.attention.scaling,
                    num_kv_heads=1,
                    cache_config=vllm_config.cache_config,
                    logits_soft_cap=self.attention.softcap,
                    prefix=f"{prefix}.head{head}",
                )
                for head in self.attention.full_kv_heads
            )
            # one step is compiled for all layers: tensors say which heads see everything, and a cache is of one layer
            is_full = torch.zeros(self.attention.heads, dtype=torch.bool)
            is_full[self.attention.full_heads] = True
            self.register_buffer("is_full", is_full, persistent=False)
            if mixer.read is not None:
                mixer.read.full_heads, mixer.read.layer_idx = [], 0
        self.step = step
        self.kv_cache, self.slots = (), {}
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One tensor: vLLM copies slots for prefixes that are shared, and wants as many tensors of each layer."""
        return slot_shape(self.state)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of that tensor."""
        return (torch.float32,)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Cut vLLM's pages (slots, 1, 1, bytes) into the tensors of `state`."""
        super().bind_kv_cache(kv_cache)
        pages, start = kv_cache.squeeze((1, 2)), 0
        for name, (shape, dtype) in self.state.items():
            size = prod(shape) * dtype.itemsize
            # by way of DLPack it is a tensor of its own to torch.compile, which takes views of one another badly
            self.slots[name] = torch.from_dlpack(pages[:, start : start + size].view(dtype).view(-1, *shape))
            start += size

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind of vLLM's whose metadata there is no more to than what ours needs."""
        return MambaAttentionBackendEnum.MAMBA1

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours."""
        return SlotBackend

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        padding_mask=None,
        seq_idx=None,
        past_key_values=None,
        window: WindowInputs | None = None,
    ) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden), all requests' tokens in one row; arguments as those of the mixer."""
        inputs = [hidden_states, *position_embeddings]
        if window is not None:
            projected = self.attention.project(hidden_states, position_embeddings, window)
            inputs += [window.index, *(t.transpose(1, 2) for t in projected[:4])]
            inputs += [] if projected.salience is None else [projected.salience]
            inputs += [self._attend_fully(projected)] if self.paged else []
        output = torch.zeros_like(hidden_states)
        torch.ops.vllm.hybrid_slots(inputs, output, self.prefix)
        return output

    def _attend_fully(self, projected: Projected) -> torch.Tensor:
        """(1, L, heads, D) of the heads that see everything; those that share their keys come along."""
        outputs, heads, shared = [], [], self.attention.heads // self.attention.kv_heads
        for head, attend in zip(self.attention.full_kv_heads, self.paged, strict=True):
            mine = range(head * shared, (head + 1) * shared)
            query = projected.query[0, mine.start : mine.stop].transpose(0, 1).flatten(1)
            output = attend(query, *(t[0, head].contiguous() for t in (projected.key, projected.value)))
            outputs.append(output.unflatten(-1, (shared, -1)))
            heads += mine
        return torch.cat(outputs, dim=1)[None, :, [heads.index(head) for head in self.attention.full_heads]]

    def run(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """What `forward` does beside projecting: each request goes on from its slot."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory, and has no slots yet, or wants everything compiled
            output.copy_(self._mix(inputs, None))
            if self.slots and self.attention is not None and self.step is not step_window:
                self._compile(inputs)
            return
        metadata: SlotMetadata = metadata[self.prefix]
        slots, decodes, begun = self.slots, metadata.num_decodes, []
        if decodes and self.attention is not None and metadata.least < self.attention.sinks:
            # the few tokens at a text's beginning that are sinks themselves
            indices = metadata.state_indices_tensor_d[:, 0].tolist()
            begun = [(i, i + 1, int(inputs[3][0, i]), slot) for i, slot in enumerate(indices)]
        elif decodes:
            which = metadata.state_indices_tensor_d[:decodes, 0].long()
            tokens = [t[0, :decodes, None] for t in inputs]
            if self.attention is None:
                cache = SlotCache(slots, which, begun=True)
                output[0, :decodes] = self._mix(tokens, cache)[:, 0]
                cache.write()
            else:
                window, position = self.attention.window, tokens[3][:, 0]
                if window not in metadata.steps:
                    metadata.steps[window] = Step.at(which, position, window, self.attention.sinks)
                output[0, :decodes] = self._decode(tokens, metadata.steps[window], metadata.least)[:, 0]
        if metadata.num_prefills:
            begun += [(*span, slot) for span, slot in zip(metadata.prompts, metadata.prompt_slots, strict=True)]
        for start, stop, seen, slot in begun:
            cache = PromptCache(slots, slot, seen, self.attention)
            output[:, start:stop] = self._mix([t[:, start:stop] for t in inputs], cache, seen)
            cache.write()

    def _mix(self, inputs: list[torch.Tensor], cache: SlotCache | None, seen: int = 0) -> torch.Tensor:
        """(B, L, hidden) of tokens (B, L, ...), which `seen` others precede."""
        if self.attention is None:
            hidden_states, *rotary = inputs
            return self.mixer(hidden_states, rotary, past_key_values=cache)
        hidden_states, cos, sin, index, projected, of_full = self._parts(inputs)
        window = WindowInputs(index, least=seen)
        near = self.attention.attend_nearby(projected, window, of_full, cache)
        if near.log_mass is not None:
            near = near._replace(log_mass=near.log_mass.masked_fill(self.is_full, torch.inf))
        return self.mixer.combine(near, hidden_states, (cos, sin), None, None, cache, window)

    def _parts(self, inputs: list[torch.Tensor]) -> tuple:
        """What `forward` has put into a list."""
        hidden_states, cos, sin, index, *rest = inputs
        projected = Projected(*(t.transpose(1, 2) for t in rest[:4]), rest[4] if self.attention.places else None)
        return hidden_states, cos, sin, index, projected, rest[-1] if self.paged else None

    def _decode(self, tokens: list[torch.Tensor], step: Step, least: int) -> torch.Tensor:
        """(B, 1, hidden) of one token of each request (B, 1, ...), behind the sinks."""
        hidden_states, cos, sin, index, projected, of_full = self._parts(tokens)
        mixer, attention, query = self.mixer, self.attention, projected.query
        # in either case a tensor of its own, laid out the same: what is compiled depends on that
        of_full = query if of_full is None else attention.with_full_heads(query, of_full)
        of_full = of_full.clone(memory_format=torch.contiguous_format)[:, :, 0]
        near, features = self.step(attention, mixer.read, self.slots, step, projected, of_full, self.is_full)
        if features is None:
            seen, cache = Near(near, None, query, None, None), SlotCache(self.slots, step.slots, begun=True)
            mixed = mixer.combine(seen, hidden_states, (cos, sin), None, None, cache, WindowInputs(index, least=least))
            cache.write()
            return mixed
        mixed = mixer.out_proj(features)
        if least >= mixer.near_tokens:
            return mixed
        return torch.where((index < mixer.near_tokens)[..., None], mixer.near_proj(near.flatten(2)), mixed)

    def _compile(self, inputs: list[torch.Tensor]) -> None:
        """Compile the step for one request and for several, with slot 0, which vLLM gives to nobody."""
        for requests in (1, 2):
            tokens = [t[0, :requests, None] for t in inputs]
            slots, position = torch.zeros_like(tokens[3][:, 0]), tokens[3][:, 0] * 0 + self.mixer.near_tokens
            step = Step.at(slots, position, self.attention.window, self.attention.sinks)
            self._decode(tokens, step, self.mixer.near_tokens)


def step_window(
    attention: WindowAttention,
    read: NormalisedRead | None,
    slots: dict[str, torch.Tensor],
    step: Step,
    new: Projected,
    of_full: torch.Tensor,
    is_full: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`WindowAttention.attend_nearby` and the read for a token of each request, behind the sinks, in the ring itself.

    Some 200 small operations, compiled to a few; no product with a layer's weights is among them.

    Args:
        of_full: (B, H, D), of which the heads that see everything count. is_full: (H,), which these are.

    Returns:
        What the heads see nearby (B, 1, H, D), and the features of a normalised read (B, 1, 3 H D).
    """
    S, R, which = attention.sinks, attention.places, step.slots
    slots["keys"][which, :, S + R + step.column] = new.key[:, :, 0]
    slots["values"][which, :, S + R + step.column] = new.value[:, :, 0]
    keys, values = slots["keys"][which], slots["values"][which]
    index, salience, leaving = step.index, None, step.leaving
    if R:
        slots["salience"][which, R + step.column] = new.salience[:, 0].float()
        index, salience = torch.cat([slots["place_index"][which].long(), index], 1), slots["salience"][which]
        leaving = torch.where(leaving >= 0, leaving + R, -1)
    first = Tokens(keys[:, :, :S], values[:, :, :S], index[:, :S])
    sight = Tokens(keys[:, :, S:], values[:, :, S:], index, salience)
    output, log_mass = attention.attend_one(new.query, new.sink_query, sight, first)
    output = torch.where(is_full[:, None], of_full.to(output.dtype), output[:, :, 0])[:, None]
    if R:
        leaving = take_place(slots, which, sight, leaving, S, R)
    if read is None:
        return output, None
    log_mass = log_mass.masked_fill(is_full[:, None], torch.inf).transpose(1, 2)
    cache = SlotCache({"recurrent": slots["recurrent"]}, which, begun=True)
    features = read(Near(output, log_mass, new.query.transpose(1, 2), sight, leaving), None, cache)
    cache.write()
    return output, features


def compiled_step() -> Callable:
    """`step_window` compiled for all layers of a model: tensors and their sizes decide what a layer does.

    So these are all that is checked at each call: to check the modules takes as long as the step.
    """
    checks = ("TENSOR_MATCH", "SHAPE_ENV")
    options = {"guard_filter_fn": lambda guards: [guard.guard_type in checks for guard in guards]}
    backend = current_platform.simple_compile_backend
    return torch.compile(step_window, backend=backend, options=options, isolate_recompiles=True)


def take_place(
    slots: dict[str, torch.Tensor], which: torch.Tensor, sight: Tokens, leaving: torch.Tensor, sinks: int, places: int
) -> torch.Tensor:
    """`compete` for one token of each request: who goes on to the state (B, 1), the token or whose place it takes.

    Args:
        sight: places, then the window. leaving: (B, 1) columns of it, -1 where nobody leaves the window.
    """
    least = sight.salience[:, :places].amin(1, keepdim=True)
    last = torch.where(sight.salience[:, :places] == least, sight.index[:, :places], -2)
    place = last.argmax(1, keepdim=True)  # of equals the earlier one stays
    wins = (leaving >= 0) & (sight.salience.gather(1, leaving.clamp(min=0)) > least)
    holder = sight.at(torch.where(wins, leaving, place))
    slots["keys"][which, :, sinks + place[:, 0]] = holder.keys[:, :, 0]
    slots["values"][which, :, sinks + place[:, 0]] = holder.values[:, :, 0]
    slots["salience"][which, place[:, 0]] = holder.salience[:, 0]
    slots["place_index"][which, place[:, 0]] = holder.index[:, 0].int()
    lost = torch.where(sight.index.gather(1, place) >= 0, place, -1)
    return torch.where(wins, lost, leaving)


def hybrid_slots(inputs: list[torch.Tensor], output: torch.Tensor, layer_name: str) -> None:
    """The layer of that name; an operator of its own, as tracing cannot look into slots."""
    get_forward_context().no_compile_layers[layer_name].run(inputs, output)


direct_register_custom_op(op_name="hybrid_slots", op_func=hybrid_slots, mutates_args=["output"])
