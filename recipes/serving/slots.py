"""Memory that a layer carries from step to step, in the slots that vLLM gives to requests.

What a mixer holds, and a hybrid layer but for its kept heads, has a constant size, so a request has one slot of each
layer: to vLLM it is the state of a Mamba layer. vLLM runs the tokens of all requests as one row: first a token each of
those that decode, then the prompts that are read, or parts of them. Those that decode are one batch here, each prompt
is a batch of its own. A slot of a hybrid layer holds the tensors of `Held`, from which the layer's own `prompt` and
`step` go on.

Shapes: B requests, L tokens, H' query and K key/value heads with a window, D head dim; those of mixers are as in
matrix_mixer.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d, direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from modeling_llamba.eviction import BlockShape, Held, NewTokens, open_block
from modeling_llamba.hybrid_attention import HybridAttention, HybridInputs, Projected
from modeling_llamba.hybrid_cache import HybridLayer
from modeling_llamba.rotary import Rotary

Slots = dict[str, torch.Tensor]
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Which = torch.Tensor | slice


def sizes_of(config, layer: int, dtype: torch.dtype) -> Sizes:
    """Shape and type of each tensor in a slot of a layer that is not plain attention, the widest types first.

    Args:
        dtype: of the weights.
    """
    if config.layer_types[layer] == "hybrid":
        shared = config.num_attention_heads // config.num_key_value_heads
        heads = config.num_key_value_heads - len(config.full_heads_of(layer)) // shared
        shape = BlockShape.of(config, layer)
        like = torch.empty(1, heads, 1, config.head_dim, dtype=dtype, device="meta")
        rows = shape.key_rounding.encode(like), shape.value_rounding.encode(like)
        salience = torch.empty(1, 1, dtype=torch.float32, device="meta")
        held = Held.empty(shape, NewTokens(*rows, salience, salience.long()))._replace(seen=None)._asdict()
        sizes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in held.items() if t is not None}
    else:
        H, G, P, N = config.mixer_num_heads, config.mixer_num_kv_heads, config.mixer_head_dim, config.mixer_d_state
        T = G if config.mixer_shared_state else H
        conv = (G * (P + N) + H * N, config.mixer_d_conv)
        sizes = {"conv": (conv, dtype), "recurrent": ((T, P, N), torch.float32)}
    return dict(sorted(sizes.items(), key=lambda item: -item[1][1].itemsize))


def slot_shape(sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """A slot as vLLM sees it: one row of float32."""
    return ((-(-sum(prod(shape) * dtype.itemsize for shape, dtype in sizes.values()) // 4),),)


class MixerCache:
    """State of a mixer for some requests: the cache and its only layer in one, as the mixer's code reads them.

    Args:
        slots: the tensors of all slots by name, (slots, ...) each. which: those of the requests, (B,) or a slice.
        begun: whether the requests have begun; if not, what the slots hold is of others.
    """

    def __init__(self, slots: Slots, which: Which, begun: bool):
        self.slots = slots
        self.which = which
        self.has_previous_state = {0: begun}
        self.conv_states, self.recurrent_states = (
            {0: slots[name][which] if begun else None} for name in ("conv", "recurrent")
        )

    @property
    def layers(self) -> "MixerCache":
        """Cache object whose `layers` the model reads."""
        return self

    def __getitem__(self, layer_idx: int) -> "MixerCache":
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
        """Put what the mixer has left here into the slots."""
        self.slots["conv"][self.which] = self.conv_states[0]
        self.slots["recurrent"][self.which] = self.recurrent_states[0].to(self.slots["recurrent"].dtype)


def held_in(slots: Slots, which: Which, seen: torch.Tensor) -> Held:
    """State of a hybrid layer for requests that have `seen` tokens (B,)."""
    return Held(*(slots[name][which] if name in slots else None for name in Held._fields[:4]), seen)


def put(slots: Slots, which: Which, held: Held) -> None:
    """Write what a hybrid layer holds into slots."""
    for name in slots:
        slots[name][which] = getattr(held, name)


class SlotRows(HybridLayer):
    """A hybrid layer's cache of requests that decode, whose tokens are written into their slots.

    The block of each token is open already. The width of the window is that of the tensors: one step is compiled for
    all widths.
    """

    def __init__(self, shape: BlockShape, slots: Slots, which: torch.Tensor):
        super().__init__(shape)
        self.slots = slots
        self.which = which

    def put(self, tokens: NewTokens, start: None) -> torch.Tensor:
        """Write a token, like `HybridLayer.put`."""
        E = self.shape.block
        P = self.shape.places
        number = tokens.index[:, 0]
        blocks = (self.slots["salience"].shape[1] - P) // E
        # blocks move forward as the window fills, so that the token's own is the last
        column = P + number - (number // E - blocks + 1).clamp(min=0) * E
        for name in ("keys", "values"):
            self.slots[name][self.which, :, column] = getattr(tokens, name)[:, :, 0]
        self.slots["salience"][self.which, column] = tokens.salience[:, 0]
        self.held = held_in(self.slots, self.which, number + 1)
        return column

    def write(self, tokens: NewTokens, start: None) -> tuple[int, int, torch.Tensor]:
        """Write a token, like `HybridLayer.write`."""
        column = self.put(tokens, start)
        return 0, self.held.salience.shape[1], self._hidden(self.held, column[:, None])


@dataclass
class SlotMetadata(BaseMambaAttentionMetadata):
    """vLLM's, and what would have to be asked of a device.

    prompts: (first token in the row, one after its last, tokens of the request before them) of each prompt. decoding:
    tokens before the next one of each request that decodes. opening: by width of the window, which of these requests
    open a block, or None; made by the first layer that asks.
    """

    prompts: list[tuple[int, int, int]] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    opening: dict[int, torch.Tensor | None] = field(default_factory=dict, init=False)

    @functools.cached_property
    def prompt_slots(self) -> list[int]:
        """The slot of each prompt; a device is asked for them once, not by every layer."""
        return self.state_indices_tensor_p.tolist()

    @functools.cached_property
    def decoding_slots(self) -> torch.Tensor:
        """The slot of each request that decodes, (B,)."""
        return self.state_indices_tensor_d[: self.num_decodes, 0].long()

    def opening_slots(self, shape: BlockShape) -> torch.Tensor | None:
        """The slots in which a block is to be opened, if any."""
        if shape.window not in self.opening:
            which = [i for i, n in enumerate(self.decoding) if n % shape.block == 0 and n >= shape.window]
            slots = self.decoding_slots
            which = async_tensor_h2d(which, dtype=torch.long, device=slots.device) if which else None
            self.opening[shape.window] = None if which is None else slots[which]
        return self.opening[shape.window]


class SlotMetadataBuilder(BaseMambaAttentionMetadataBuilder[SlotMetadata]):
    """Counts on the CPU, once for all layers of a step."""

    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False
    # prompts are gone through one by one, and blocks opened where one begins: graphs hold what lies between layers
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False, **kwargs
    ) -> SlotMetadata:
        """Metadata that `SlotLayer` reads at each step."""
        metadata = self._compute_common_metadata(common_attn_metadata)
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        spans = [(s, e, n - (e - s)) for s, e, n in zip(ends, ends[1:], lengths, strict=False)]
        decodes = spans[: metadata.num_decodes]
        prompts = spans[metadata.num_decodes :]
        metadata.prompts = prompts[: metadata.num_prefills]
        metadata.decoding = [seen for _, _, seen in decodes]
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
    """A layer that goes on from slots; takes the place of the one that it holds.

    A kind of layer has `forward`, which hands tensors (1, L, ...) to `in_slots`, and `prompt` and `decode`, which
    write what `in_slots` returns.
    """

    def __init__(self, mixer: nn.Module, config, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.mixer = mixer
        self.prefix = prefix
        self.sizes = sizes_of(config, layer, vllm_config.model_config.dtype)
        self.kv_cache = ()
        self.slots = {}
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One tensor: vLLM copies slots for prefixes that are shared, and wants as many tensors of each layer."""
        return slot_shape(self.sizes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the state tensor, as a one-element tuple."""
        return (torch.float32,)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Cut vLLM's pages (slots, 1, 1, bytes) into the tensors of a slot."""
        super().bind_kv_cache(kv_cache)
        pages = kv_cache.squeeze((1, 2))
        start = 0
        for name, (shape, dtype) in self.sizes.items():
            size = prod(shape) * dtype.itemsize
            # by way of DLPack it is a tensor of its own to torch.compile, which takes views of one another badly
            self.slots[name] = torch.from_dlpack(pages[:, start : start + size].view(dtype).view(-1, *shape))
            start += size

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Kind of state layer by which vLLM prepares metadata; that of Mamba-1 holds all that is needed here."""
        return MambaAttentionBackendEnum.MAMBA1

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Backend whose builder makes `SlotMetadata`, for vLLM."""
        return SlotBackend

    def in_slots(self, inputs: list[torch.Tensor], width: int) -> torch.Tensor:
        """(1, L, width) from tensors (1, L, ...) of all requests' tokens in one row."""
        output = inputs[-1].new_zeros(*inputs[-1].shape[:2], width)
        torch.ops.vllm.hybrid_slots(inputs, output, self.prefix)
        return output

    def run(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Run a layer from slots: each request goes on from its own."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory
            self.prompt(inputs, output, None, 0)
            return
        metadata: SlotMetadata = metadata[self.prefix]
        decodes = metadata.num_decodes
        if decodes:
            self.decode([t[0, :decodes, None] for t in inputs], output[0, :decodes, None], metadata)
        if metadata.num_prefills:
            for (start, stop, seen), slot in zip(metadata.prompts, metadata.prompt_slots, strict=True):
                part = slice(start, stop)
                self.prompt([t[:, part] for t in inputs], output[:, part], slice(slot, slot + 1), seen)


class MixerSlots(SlotLayer):
    """A mixer."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Rotary, *nothing: None) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden)."""
        return self.in_slots([*position_embeddings, hidden_states], hidden_states.shape[-1])

    def prompt(self, inputs: list[torch.Tensor], output: torch.Tensor, which: slice | None, seen: int) -> None:
        """Tokens of one request, which `seen` others precede."""
        self._mix(inputs, output, None if which is None else MixerCache(self.slots, which, seen > 0))

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request."""
        self._mix(inputs, output, MixerCache(self.slots, metadata.decoding_slots, begun=True))

    def _mix(self, inputs: list[torch.Tensor], output: torch.Tensor, cache: MixerCache | None) -> None:
        *rotary, hidden_states = inputs
        output.copy_(self.mixer(hidden_states, rotary, past_key_values=cache))
        if cache is not None:
            cache.write()


class PagedHeads(nn.ModuleList):
    """Kept heads: one attention of vLLM's for each key/value head, so that all pages of a model can have one size."""

    def __init__(self, attention: HybridAttention, cache_config, prefix: str):
        super().__init__(
            Attention(
                attention.shared,
                attention.head_dim,
                attention.scaling,
                num_kv_heads=1,
                cache_config=cache_config,
                logits_soft_cap=attention.softcap,
                prefix=f"{prefix}.head{head}",
            )
            for head in attention.kept
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(L, heads * D) of all kept heads, each."""
        heads = zip(self, *(t.chunk(len(self), dim=-1) for t in (query, key, value)), strict=True)
        return torch.cat([attend(*(t.contiguous() for t in own)) for attend, *own in heads], dim=-1)


class HybridSlots(SlotLayer):
    """A hybrid layer.

    Args:
        step: `step_rows`, or `compiled_step()`, the same for all layers of a model.
    """

    def __init__(
        self, mixer: HybridAttention, config, layer: int, vllm_config: VllmConfig, prefix: str, step: Callable
    ):
        super().__init__(mixer, config, layer, vllm_config, prefix)
        self.step = step
        self.example = None
        if mixer.kept:
            mixer.kept_heads.paged = PagedHeads(mixer, vllm_config.cache_config, prefix)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Compile the step, too, for one request and for several, with slot 0, which vLLM gives to no request."""
        super().bind_kv_cache(kv_cache)
        if self.example is None or self.step is step_rows:
            return
        for name, t in self.slots.items():  # what is compiled for one layer does for windows of other widths
            torch._dynamo.maybe_mark_dynamic(t, [0, *{"keys": [2], "values": [2], "salience": [1]}.get(name, [])])
        for requests in (1, 2):
            tokens = [t.repeat(requests, *[1] * (t.ndim - 1)) for t in self.example]
            with torch.inference_mode():
                self._step(tokens, tokens[0].new_zeros(requests))

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotary, inputs: HybridInputs, *nothing: None
    ) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden)."""
        attention = self.mixer
        projected = attention.project(hidden_states, position_embeddings, inputs)
        of_kept = attention.attend_kept(projected, None, None) if attention.kept else None
        new = attention.select_windowed(projected)
        heads = torch.cat([t for t in new[:4] if t is not None], dim=1)
        size = new.query[0, :, 0].numel()
        width = size if attention.down is None else 4 * size
        mixed = self.in_slots([inputs.index, new.salience, heads.transpose(1, 2)], width)
        output = mixed[..., :size].unflatten(2, (-1, attention.head_dim))
        return attention.project_out(output, of_kept, mixed[..., size:])

    def prompt(self, inputs: list[torch.Tensor], output: torch.Tensor, which: slice | None, seen: int) -> None:
        """Tokens of one request, which `seen` others precede."""
        index = inputs[0]
        projected = projected_of(self.mixer, *inputs[1:])
        if which is None:
            cache = None
            self.example = [t[0, :1, None].clone() for t in inputs]
        else:
            cache = HybridLayer(self.mixer.shape)
            cache.held = held_in(self.slots, which, index[:, 0]) if seen else None
        self._give(output, *self.mixer.prompt(projected, HybridInputs(index, start=seen), cache))
        if cache is not None:
            put(self.slots, which, cache.held)

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request."""
        opening = metadata.opening_slots(self.mixer.shape)
        if opening is not None:
            put(self.slots, opening, open_block(held_in(self.slots, opening, opening), self.mixer.shape))
        self._give(output, *self._step(inputs, metadata.decoding_slots))

    def _step(self, inputs: list[torch.Tensor], which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # made and laid out alike, since what is compiled depends on that
        inputs = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
        return self.step(self.mixer, self.slots, which, *inputs)

    def _give(self, output: torch.Tensor, of_heads: torch.Tensor, features: torch.Tensor | None) -> None:
        """Write (B, L, H', D) and the features of the last tokens (B, L', 3 H' D) into the output, which is zero."""
        of_heads = of_heads.flatten(2)
        size = of_heads.shape[2]
        output[..., :size] = of_heads
        if features is not None and size < output.shape[2]:
            output[:, output.shape[1] - features.shape[1] :, size:] = features


def projected_of(attention: HybridAttention, salience: torch.Tensor, heads: torch.Tensor) -> Projected:
    """Inputs that `HybridSlots.forward` has put together."""
    heads = heads.transpose(1, 2)
    (K, shared) = attention.kv_groups
    queries, key, value = heads.split([heads.shape[1] - 2 * K, K, K], dim=1)
    query, *sink_query = queries.split(K * shared, dim=1)
    rows = attention.rows_of(key, value)
    return Projected(query, sink_query[0] if sink_query else None, key, value, salience, *rows)


def step_rows(
    attention: HybridAttention,
    slots: Slots,
    which: torch.Tensor,
    index: torch.Tensor,
    salience: torch.Tensor,
    heads: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`HybridAttention.step` for a token of each request, in the slots themselves."""
    projected = projected_of(attention, salience, heads)
    return attention.step(projected, HybridInputs(index), SlotRows(attention.shape, slots, which))


def compiled_step() -> Callable:
    """`step_rows` compiled for all layers of a model: tensors and their sizes decide what a layer does.

    So these are all that is checked at each call: to check the modules takes as long as the step.
    """
    checks = ("TENSOR_MATCH", "SHAPE_ENV")
    options = {"guard_filter_fn": lambda guards: [guard.guard_type in checks for guard in guards]}
    backend = current_platform.simple_compile_backend
    return torch.compile(step_rows, backend=backend, options=options, isolate_recompiles=True, recompile_limit=64)


def hybrid_slots(inputs: list[torch.Tensor], output: torch.Tensor, layer_name: str) -> None:
    """The layer of that name; an operator of its own, as tracing cannot look into slots."""
    get_forward_context().no_compile_layers[layer_name].run(inputs, output)


direct_register_custom_op(op_name="hybrid_slots", op_func=hybrid_slots, mutates_args=["output"])
