"""Memory that a layer carries from step to step, in the slots that vLLM gives to requests.

What a mixer holds, and a hybrid layer but for its kept heads, has a constant size, so a request has one slot of each
layer. Slots are of very different sizes and vLLM's pages all of one, so a slot lies in as many pages as it needs; to
vLLM each of them is the state of a Mamba layer (`SlotPage`). A step copies the slots of its requests into one tensor,
works there, and writes back what has changed. vLLM runs the tokens of all requests as one row: first a token each of
those that decode, then the prompts that are read, or parts of them. Those that decode are one batch here, and prompts
that begin at the same token are batches of like lengths (`together`). A slot of a hybrid layer holds the tensors of
`Held`, from which the layer's own `prompt` and `step` go on.

Shapes: B requests, L tokens, H' query and K key/value heads with a window, D head dim; those of mixers are as in
matrix_mixer.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, async_tensor_h2d, direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from modeling_llamba.eviction import BlockShape, Held, NewTokens, open_block
from modeling_llamba.hybrid_attention import HybridAttention, HybridInputs, Projected
from modeling_llamba.hybrid_cache import HybridLayer
from modeling_llamba.rotary import Rotary

Slots = dict[str, torch.Tensor]
"""The tensors of some requests' slots, (B, ...) each."""
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
PAGE = 2**15
"""Bytes of a page at least. Of larger pages more is left empty, of smaller ones vLLM has more to keep account of."""


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


def bytes_of(sizes: Sizes) -> int:
    """Bytes of a slot."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in sizes.values())


def page_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a page: as many of the pages that attention takes anyway as make PAGE bytes."""
    config = vllm_config.model_config.hf_config
    cache = vllm_config.cache_config
    is_auto = cache.cache_dtype == "auto"
    dtype = vllm_config.model_config.dtype if is_auto else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    heads = config.num_key_value_heads if {"full_attention", "sliding_attention"} & set(config.layer_types) else 1
    unit = cache.block_size * heads * 2 * config.head_dim * dtype.itemsize
    return unit * -(-PAGE // unit)


class MixerCache:
    """State of a mixer for some requests: the cache and its only layer in one, as the mixer's code reads them.

    Args:
        slots: the requests'. begun: whether the requests have begun; if not, what the slots hold is of others.
    """

    def __init__(self, slots: Slots, begun: bool):
        self.slots = slots
        self.has_previous_state = {0: begun}
        self.conv_states, self.recurrent_states = (
            {0: slots[name].contiguous() if begun else None} for name in ("conv", "recurrent")
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
        self.slots["conv"].copy_(self.conv_states[0])
        self.slots["recurrent"].copy_(self.recurrent_states[0])


def held_in(slots: Slots, seen: torch.Tensor) -> Held:
    """State of a hybrid layer for requests that have `seen` tokens (B,)."""
    return Held(*(slots.get(name) for name in Held._fields[:4]), seen)


def put(slots: Slots, held: Held) -> None:
    """Write what a hybrid layer holds into slots."""
    for name in slots:
        slots[name].copy_(getattr(held, name))


class SlotRows(HybridLayer):
    """A hybrid layer's cache of requests that decode, whose tokens are written into their slots.

    The block of each token is open already. The width of the window is that of the tensors: one step is compiled for
    all widths.
    """

    def __init__(self, shape: BlockShape, slots: Slots):
        super().__init__(shape)
        self.slots = slots

    def put(self, tokens: NewTokens, start: None) -> torch.Tensor:
        """Write a token, like `HybridLayer.put`."""
        E = self.shape.block
        P = self.shape.places
        number = tokens.index[:, 0]
        blocks = (self.slots["salience"].shape[1] - P) // E
        # blocks move forward as the window fills, so that the token's own is the last
        column = P + number - (number // E - blocks + 1).clamp(min=0) * E
        row = torch.arange(number.shape[0], device=number.device)
        for name in ("keys", "values"):
            self.slots[name][row, :, column] = getattr(tokens, name)[:, :, 0]
        self.slots["salience"][row, column] = tokens.salience[:, 0]
        self.held = held_in(self.slots, number + 1)
        return column

    def put_one(self, tokens: NewTokens) -> None:
        """Write a token, like `HybridLayer.put_one`, whose kernel would open its block once more."""
        self.put(tokens, None)

    def write(self, tokens: NewTokens, start: None) -> tuple[int, int, torch.Tensor]:
        """Write a token, like `HybridLayer.write`."""
        column = self.put(tokens, start)
        return 0, self.held.salience.shape[1], self._hidden(self.held, column[:, None])


PADDED = 1.25
"""Tokens of a batch of prompts, padding included, for each of its tokens at most."""


class Span(NamedTuple):
    """Prompt, or a part of it, in vLLM's row: its first token, one after its last, and the request's tokens before."""

    start: int
    stop: int
    seen: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def together(spans: list[Span], ragged: bool) -> list[list[int]]:
    """Numbers of the spans that are one batch each, the longest first: all of it begins at the same token.

    Args:
        ragged: True if shorter spans may be padded; else those of a batch are of one length.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].seen, -spans[i].length)):
        span = spans[i]
        batch = batches[-1] if batches else None
        if batch is not None and spans[batch[0]].seen == span.seen:
            longest = spans[batch[0]].length
            tokens = sum(spans[j].length for j in batch) + span.length
            if span.length == longest or (ragged and longest * (len(batch) + 1) <= PADDED * tokens):
                batch.append(i)
                continue
        batches.append([i])
    return batches


@dataclass
class SlotMetadata(BaseMambaAttentionMetadata):
    """vLLM's, and what would have to be asked of a device.

    prompts: the span of each prompt. decoding: tokens before the next one of each request that decodes. opening: by
    width of the window, which of these requests open a block, or None; made by the first layer that asks.
    """

    prompts: list[Span] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    opening: dict[int, torch.Tensor | None] = field(default_factory=dict, init=False)

    @functools.cached_property
    def ragged_batches(self) -> list[list[int]]:
        """Prompts that are one batch where padding does no harm."""
        return together(self.prompts, ragged=True)

    @functools.cached_property
    def even_batches(self) -> list[list[int]]:
        """Prompts that are one batch without padding."""
        return together(self.prompts, ragged=False)

    def pages(self, decode: bool) -> torch.Tensor:
        """The page of each request that decodes, or of each prompt, (B,)."""
        if decode:
            return self.state_indices_tensor_d[: self.num_decodes, 0]
        return self.state_indices_tensor_p

    def opening_rows(self, shape: BlockShape, device: torch.device) -> torch.Tensor | None:
        """Rows of those that decode in which a block is to be opened, if any."""
        if shape.window not in self.opening:
            rows = [i for i, n in enumerate(self.decoding) if n % shape.block == 0 and n >= shape.window]
            self.opening[shape.window] = async_tensor_h2d(rows, dtype=torch.long, device=device) if rows else None
        return self.opening[shape.window]


class SlotMetadataBuilder(BaseMambaAttentionMetadataBuilder[SlotMetadata]):
    """Counts on the CPU, once for all layers of a step."""

    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False
    # prompts are of any lengths, and blocks opened where one begins: graphs hold what lies between layers
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False, **kwargs
    ) -> SlotMetadata:
        """Metadata that `SlotLayer` reads at each step."""
        metadata = self._compute_common_metadata(common_attn_metadata)
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        spans = [Span(s, e, n - (e - s)) for s, e, n in zip(ends, ends[1:], lengths, strict=False)]
        decodes = spans[: metadata.num_decodes]
        prompts = spans[metadata.num_decodes :]
        metadata.prompts = prompts[: metadata.num_prefills]
        metadata.decoding = [span.seen for span in decodes]
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


class SlotPage(MambaBase):
    """A page of a layer's slot, to vLLM the state of a Mamba layer.

    Args:
        bound: called when vLLM has given the page its memory.
    """

    def __init__(self, prefix: str, vllm_config: VllmConfig, bound: Callable[[], None]):
        self.prefix = prefix
        self.bound = bound
        self.size = page_bytes(vllm_config)
        self.kv_cache = ()
        self.first_row = 0
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """A state as large as a page, so that vLLM has nothing to pad."""
        return replace(super().get_kv_cache_spec(vllm_config), page_size_padded=None)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One tensor: vLLM copies pages for prefixes that are shared, and wants as many tensors of each layer."""
        return ((self.size // 4,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the state tensor, as a one-element tuple."""
        return (torch.float32,)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Find vLLM's pages (pages, 1, 1, bytes) in the memory that all layers share."""
        super().bind_kv_cache(kv_cache)
        self.size = kv_cache.stride(0) * kv_cache.element_size()
        first_byte = kv_cache.storage_offset() * kv_cache.element_size()
        assert first_byte % self.size == 0
        self.first_row = first_byte // self.size
        self.bound()

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Kind of state layer by which vLLM prepares metadata; that of Mamba-1 holds all that is needed here."""
        return MambaAttentionBackendEnum.MAMBA1

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Backend whose builder makes `SlotMetadata`, for vLLM."""
        return SlotBackend


class SlotLayer(nn.Module):
    """A layer that goes on from slots; takes the place of the one that it holds.

    A kind of layer has `forward`, which hands tensors (1, L, ...) to `in_slots`, and `prompt` and `decode`, which
    write what `in_slots` returns. paddings: what of each of these tensors stands behind a prompt that is shorter than
    others of its batch; None where none may be. Rows (B, pages) say where in memory the pages of requests lie.
    """

    paddings: list[float] | None = None

    def __init__(self, mixer: nn.Module, config, layer: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.mixer = mixer
        self.prefix = prefix
        self.sizes = sizes_of(config, layer, vllm_config.model_config.dtype)
        self.memory = None
        count = -(-bytes_of(self.sizes) // page_bytes(vllm_config))
        self.pages = [SlotPage(f"{prefix}.page{i}", vllm_config, self._bound) for i in range(count)]
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def _bound(self) -> None:
        if any(len(page.kv_cache) == 0 for page in self.pages):
            return
        last = self.pages[-1]
        whole = torch.empty(0, dtype=torch.uint8, device=last.kv_cache[0].device)
        whole.set_(last.kv_cache[0].untyped_storage())
        self.memory = whole[: len(whole) // last.size * last.size].view(-1, last.size)
        self.first_rows = torch.tensor([page.first_row for page in self.pages], device=whole.device)
        self.ready()

    def ready(self) -> None:
        """Do what needs the slots' memory once."""

    def rows(self, decode: bool) -> torch.Tensor:
        """Rows of memory (B, pages) of the requests that decode, or of those whose prompts are read."""
        metadata = get_forward_context().attn_metadata
        pages = [metadata[page.prefix].pages(decode) for page in self.pages]
        return torch.stack(pages, dim=1) + self.first_rows

    def fetch(self, rows: torch.Tensor) -> tuple[torch.Tensor, Slots]:
        """Bytes (B, bytes) of requests' slots, and the tensors that they are."""
        content = self.memory[rows].flatten(1)
        return content, self.cut(content)

    def empty(self, requests: int) -> tuple[torch.Tensor, Slots]:
        """`fetch` for requests that have no slots yet."""
        # what is left of a page may be attention's next, which multiplies numbers of no token by zero: none may be NaN
        content = self.memory.new_zeros(requests, len(self.pages) * self.memory.shape[1])
        return content, self.cut(content)

    def cut(self, content: torch.Tensor) -> Slots:
        """The tensors in slots (B, bytes)."""
        slots = {}
        start = 0
        for name, (shape, dtype) in self.sizes.items():
            size = prod(shape) * dtype.itemsize
            tensor = content[:, start : start + size].view(dtype).view(-1, *shape)
            # by way of DLPack it is a tensor of its own to torch.compile, which takes views of one another badly
            slots[name] = torch.from_dlpack(tensor)
            start += size
        return slots

    def store(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        """Write whole slots (B, bytes)."""
        self.memory[rows] = content.view(*rows.shape, -1)

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
        metadata: SlotMetadata = metadata[self.pages[0].prefix]
        decodes = metadata.num_decodes
        if decodes:
            self.decode([t[0, :decodes, None] for t in inputs], output[0, :decodes, None], metadata)
        if metadata.num_prefills:
            rows = self.rows(decode=False)
            for batch in metadata.even_batches if self.paddings is None else metadata.ragged_batches:
                self._prompts(inputs, output, [metadata.prompts[i] for i in batch], rows[batch])

    def _prompts(
        self, inputs: list[torch.Tensor], output: torch.Tensor, spans: list[Span], rows: torch.Tensor
    ) -> None:
        """Prompts of some requests, as one batch."""
        first = spans[0]
        if len(spans) == 1:
            part = slice(first.start, first.stop)
            self.prompt([t[:, part] for t in inputs], output[:, part], rows, first.seen)
            return
        paddings = self.paddings or [0.0] * len(inputs)
        batch = [
            pad_sequence([t[0, span.start : span.stop] for span in spans], True, padding)
            for t, padding in zip(inputs, paddings, strict=True)
        ]
        mixed = output.new_zeros(len(spans), first.length, output.shape[2])
        self.prompt(batch, mixed, rows, first.seen)
        for row, span in zip(mixed, spans, strict=True):
            output[0, span.start : span.stop] = row[: span.length]


class MixerSlots(SlotLayer):
    """A mixer."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Rotary, *nothing: None) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden)."""
        return self.in_slots([*position_embeddings, hidden_states], hidden_states.shape[-1])

    def prompt(self, inputs: list[torch.Tensor], output: torch.Tensor, rows: torch.Tensor | None, seen: int) -> None:
        """Tokens (B, L, ...) of requests, which `seen` others precede in each."""
        if rows is None:
            self._mix(inputs, output, None)
            return
        content, slots = self.fetch(rows) if seen else self.empty(len(rows))
        self._mix(inputs, output, MixerCache(slots, seen > 0))
        self.store(rows, content)

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request."""
        rows = self.rows(decode=True)
        content, slots = self.fetch(rows)
        self._mix(inputs, output, MixerCache(slots, begun=True))
        self.store(rows, content)

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

    Padding has no number and no salience, so that nothing of it is held.

    Args:
        step: `step_rows`, or `compiled_step()`, the same for all layers of a model.
    """

    paddings = [-1, -torch.inf, 0.0]

    def __init__(
        self, mixer: HybridAttention, config, layer: int, vllm_config: VllmConfig, prefix: str, step: Callable
    ):
        super().__init__(mixer, config, layer, vllm_config, prefix)
        self.step = step
        self.example = None
        self.reach = config.hybrid_sink_reach
        self.columns = mixer.shape.places + mixer.shape.window
        if mixer.kept:
            mixer.kept_heads.paged = PagedHeads(mixer, vllm_config.cache_config, prefix)

    def ready(self) -> None:
        """Compile the step for one request and for several; find the bytes that one writes."""
        self.written, self.per_column = self._written()
        if self.example is None or self.step is step_rows:
            return
        examples = [self.example]
        if self._has_far_sinks(self.example):
            examples.append(self._without_far_sinks(self.example))
        for example in examples:
            for requests in (1, 2):
                tokens = [t.repeat(requests, *[1] * (t.ndim - 1)) for t in example]
                _, slots = self.empty(requests)
                for name, t in slots.items():  # what is compiled for one layer does for windows of other widths
                    t.zero_()
                    torch._dynamo.maybe_mark_dynamic(
                        t, [0, *{"keys": [2], "values": [2], "salience": [1]}.get(name, [])]
                    )
                with torch.inference_mode():
                    self._step(tokens, slots)

    def _written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of a slot that belong to a token in its first column, and how much farther they are in the next."""
        places = torch.arange(len(self.pages) * self.memory.shape[1], device=self.memory.device)
        found = []
        start = 0
        for name, (shape, dtype) in self.sizes.items():
            size = prod(shape) * dtype.itemsize
            if name != "state":
                of_token = dtype.itemsize * (1 if name == "salience" else shape[-1])
                columns = places[start : start + size].view(-1, self.columns, of_token)
                found.append((columns[:, 0].flatten(), of_token))
            start += size
        steps = [torch.full_like(places, step) for places, step in found]
        return torch.cat([places for places, _ in found]), torch.cat(steps)

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
        rank = 0 if attention.down is None else attention.down.out_features
        mixed = self.in_slots([inputs.index, new.salience, heads.transpose(1, 2)], size + rank)
        output = mixed[..., :size].unflatten(2, (-1, attention.head_dim))
        output = attention.project_out(output, of_kept, None)
        return output if rank == 0 else output + attention.up(mixed[..., size:])

    def prompt(self, inputs: list[torch.Tensor], output: torch.Tensor, rows: torch.Tensor | None, seen: int) -> None:
        """Tokens (B, L, ...) of requests, which `seen` others precede in each; index -1 at padding behind them."""
        index = inputs[0]
        if rows is None:
            self.example = [t[0, :1, None].clone() for t in inputs]
        if seen + index.shape[1] <= self.reach:
            inputs = self._without_far_sinks(inputs)
        projected = projected_of(self.mixer, *inputs[1:])
        inputs = HybridInputs(index, start=seen, end_alike=False)
        if rows is None:
            self._give(output, *self.mixer.prompt(projected, inputs, None))
            return
        cache = HybridLayer(self.mixer.shape)
        content, slots = self.fetch(rows) if seen else self.empty(len(rows))
        cache.held = held_in(slots, index[:, 0]) if seen else None
        self._give(output, *self.mixer.prompt(projected, inputs, cache))
        put(slots, cache.held)
        self.store(rows, content)

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request."""
        shape = self.mixer.shape
        rows = self.rows(decode=True)
        content, slots = self.fetch(rows)
        opening = metadata.opening_rows(shape, rows.device)
        if opening is not None:
            before = {name: t[opening] for name, t in slots.items()}
            held = open_block(held_in(before, opening), shape)
            for name, t in slots.items():
                t[opening] = getattr(held, name)
            self.store(rows[opening], content[opening])
        if max(metadata.decoding) < self.reach:
            inputs = self._without_far_sinks(inputs)
        self._give(output, *self._step(inputs, slots))
        self._store_columns(rows, content, inputs[0][:, 0])

    def _store_columns(self, rows: torch.Tensor, content: torch.Tensor, number: torch.Tensor) -> None:
        """Write the columns of the tokens of these numbers (B,) alone."""
        shape = self.mixer.shape
        blocks_before = (number // shape.block - shape.whole_blocks).clamp(min=0)
        column = shape.places + number - blocks_before * shape.block
        places = self.written + column[:, None] * self.per_column
        size = self.memory.shape[1]
        where = rows.gather(1, places // size) * size + places % size
        self.memory.view(-1)[where] = content.gather(1, places)

    def _step(self, inputs: list[torch.Tensor], slots: Slots) -> tuple[torch.Tensor, torch.Tensor | None]:
        # made and laid out alike, since what is compiled depends on that
        inputs = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
        return self.step(self.mixer, slots, *inputs)

    def _has_far_sinks(self, inputs: list[torch.Tensor]) -> bool:
        """True if there are queries to sinks that are farther away than the teacher was trained for."""
        K, shared = self.mixer.kv_groups
        return inputs[2].shape[2] > K * (shared + 2)

    def _without_far_sinks(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Leave these queries out: of tokens that no sink is so far from, they are the others' equal."""
        if not self._has_far_sinks(inputs):
            return inputs
        K, shared = self.mixer.kv_groups
        index, salience, heads = inputs
        return [index, salience, torch.cat([heads[:, :, : K * shared], heads[:, :, 2 * K * shared :]], dim=2)]

    def _give(self, output: torch.Tensor, of_heads: torch.Tensor, features: torch.Tensor | None) -> None:
        """Write (B, L, H', D) and what the low-rank map makes of the features of the last tokens, (B, L', 3 H' D),
        into the output, which is zero."""
        of_heads = of_heads.flatten(2)
        size = of_heads.shape[2]
        output[..., :size] = of_heads
        if features is not None and size < output.shape[2]:
            output[:, output.shape[1] - features.shape[1] :, size:] = self.mixer.down(features)


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
    index: torch.Tensor,
    salience: torch.Tensor,
    heads: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`HybridAttention.step` for a token of each request, in the slots themselves."""
    projected = projected_of(attention, salience, heads)
    return attention.step(projected, HybridInputs(index), SlotRows(attention.shape, slots))


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
