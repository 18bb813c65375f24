"""Memory that vLLM gives to requests: pages of slots, and pages of kept heads.

What a mixer holds, and a hybrid layer but for its kept heads, has a constant size. All layers' slots lie one behind
another in a few pages that a request has from its first token to its last, each of which is the state of a Mamba layer
to vLLM (`SlotPage`). The keys and values of all kept heads are rows of the checkpoint's own bits (rounding.py), and so
are those of layers with full attention, all heads of which are kept, where these bits are fewer than the model's type
has. The rows of some tokens are a page, to vLLM that of one attention layer (`HeadPages`). Both kinds have one size,
and so come out of one pool. Where there are such rows alone, no page is larger than what they take for a block of
tokens; attention of vLLM's own needs pages of 32 KiB at least, and a model without either one page of all slots. A
request leaves at most a part of a page empty.

Shapes: B batch (requests), L length, K key/value heads, W bytes of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from modeling_llamba.hybrid.eviction import BlockShape, Held, NewTokens
from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.kernels.backend import backend_for

Slots = dict[str, torch.Tensor]
"""The tensors of some requests' slots, (B, ...) each."""
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
LEAST = 2**15
"""Bytes of a page at least beside vLLM's own attention. Of smaller ones vLLM has more to keep account of."""
MOST_PAGES = 32
"""Pages of a request's slots at most beside kept heads: vLLM keeps account of each by itself."""
ALIGNED = 16
"""Bytes at a multiple of which every slot begins."""


def sizes_of(config, layer: int, dtype: torch.dtype) -> Sizes:
    """Shape and type of each tensor in a slot of a layer that is not plain attention, the widest types first.

    Args:
        dtype: of the weights.
    """
    if config.layer_types[layer] == "hybrid":
        heads = config.num_key_value_heads - kept_heads(config, layer)
        shape = BlockShape.of(config, layer)
        like = torch.empty(1, heads, 1, config.head_dim, dtype=dtype, device="meta")
        rows = shape.key_rounding.encode(like), shape.value_rounding.encode(like)
        salience = torch.empty(1, 1, dtype=torch.float32, device="meta")
        held = Held.empty(shape, NewTokens(*rows, salience, salience.long()))._replace(seen=None)._asdict()
        sizes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in held.items() if t is not None}
    else:
        H, G, P, N = config.mixer_num_heads, config.mixer_num_kv_heads, config.mixer_head_dim, config.mixer_d_state
        U = G if config.mixer_shared_state else H
        conv = (G * (P + N) + H * N, config.mixer_d_conv)
        sizes = {"conv": (conv, dtype), "recurrent": ((U, P, N), torch.float32)}
    # so that each tensor begins at a multiple of its type's size, as `view(dtype)` requires
    return dict(sorted(sizes.items(), key=lambda item: -item[1][1].itemsize))


def bytes_of(sizes: Sizes) -> int:
    """Bytes of a slot, up to where another may begin."""
    return aligned(sum(prod(shape) * dtype.itemsize for shape, dtype in sizes.values()))


def aligned(size: int) -> int:
    """Round up to where a slot may begin."""
    return -(-size // ALIGNED) * ALIGNED


def kept_heads(config, layer: int) -> int:
    """Number of a hybrid layer's kept key/value heads."""
    return len(config.full_heads_of(layer)) * config.num_key_value_heads // config.num_attention_heads


def heads_in_rows(vllm_config: VllmConfig, layer: int) -> int:
    """Number of a layer's key/value heads whose rows lie in pages of heads, and not in vLLM's own attention."""
    config = vllm_config.model_config.hf_config
    kind = config.layer_types[layer]
    if kind == "hybrid":
        return kept_heads(config, layer)
    # without a layer that has a slot, vLLM takes the model for one of attention alone
    has_slots = not {"hybrid", "linear_attention"}.isdisjoint(config.layer_types)
    if kind == "full_attention" and has_slots and any(rounding.rounds for rounding in kept_roundings(vllm_config)):
        return config.num_key_value_heads
    return 0


def kept_roundings(vllm_config: VllmConfig) -> tuple[Rounding, Rounding]:
    """Rounding of kept heads' keys and values: the checkpoint's; 8 bits at most with vLLM's own flag for 8."""
    config = vllm_config.model_config.hf_config
    roundings = Rounding.of_pair(config.full_attention_bits, config.head_dim, config.backend)
    if vllm_config.cache_config.cache_dtype == "auto":
        return roundings
    return tuple(rounding._replace(bits=min(rounding.bits, 8)) for rounding in roundings)


class Sizing(NamedTuple):
    """Bytes of what a request holds: slots of all layers together, and a token's rows of kept heads, keys and values;
    unit: of a token in a layer of vLLM's own attention, 0 where there is none."""

    slots: int
    keys: int
    values: int
    unit: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "Sizing":
        """The sizes of a model."""
        config = vllm_config.model_config.hf_config
        dtype = vllm_config.model_config.dtype
        kinds = enumerate(config.layer_types)
        slots = sum(
            bytes_of(sizes_of(config, i, dtype)) for i, kind in kinds if kind in ("hybrid", "linear_attention")
        )
        in_rows = [heads_in_rows(vllm_config, i) for i in range(config.num_hidden_layers)]
        keys, values = (sum(in_rows) * rounding.width(dtype) for rounding in kept_roundings(vllm_config))
        unit = 0
        attention = {kind for kind, heads in zip(config.layer_types, in_rows, strict=True) if not heads}
        if {"full_attention", "sliding_attention"} & attention:
            cache = vllm_config.cache_config.cache_dtype
            dtype = dtype if cache == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache]
            unit = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
        return cls(slots, keys, values, unit)

    def page(self, block: int) -> int:
        """Bytes of a page, where so many tokens are a block."""
        of_heads = (self.keys + self.values) * block
        if self.unit:
            unit = self.unit * block
            # a multiple of the page of its attention, whose blocks vLLM then lengthens instead of padding them
            return unit * -(-max(LEAST, of_heads) // unit)
        return aligned(of_heads or self.slots)

    def block(self, least: int) -> int:
        """Tokens of a block, a multiple of `least`.

        Attention of vLLM's own then fills a page of LEAST; without any, the slots take no more than MOST_PAGES.
        """
        per_token = self.keys + self.values
        if self.unit:
            return least * -(-LEAST // (self.unit * least))
        if not per_token:
            return least
        return least * max(-(-self.slots // (MOST_PAGES * per_token * least)), 1)


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

    @property
    def stop_in_request(self) -> int:
        """Number of the request's tokens up to the last of these."""
        return self.seen + self.length


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


def batched(t: torch.Tensor, spans: list[Span], padding: float) -> torch.Tensor:
    """The tokens (B, L, ...) of spans of a row (1, L', ...), padded to the first, which is the longest."""
    if len(spans) == 1:
        return t[:, spans[0].start : spans[0].stop]
    return pad_sequence([t[0, span.start : span.stop] for span in spans], True, padding)


@dataclass
class SlotMetadata(BaseMambaAttentionMetadata):
    """vLLM's, and what would have to be asked of a device.

    prompts: the span of each prompt. decoding: tokens before the next one of each request that decodes. opening: by
    width of the window, which of these requests open a block, or None; rows: those of memory. Both are made by the
    first layer that asks.
    """

    prompts: list[Span] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    opening: dict[int, torch.Tensor | None] = field(default_factory=dict, init=False)
    rows: dict[bool, torch.Tensor] = field(default_factory=dict, init=False)

    def pages(self, decode: bool) -> torch.Tensor:
        """The page of each request that decodes, or of each prompt, (B,)."""
        if decode:
            return self.state_indices_tensor_d[: self.num_decodes, 0]
        return self.state_indices_tensor_p

    @functools.cached_property
    def ragged_batches(self) -> list[list[int]]:
        """Prompts that are one batch where padding does no harm."""
        return together(self.prompts, ragged=True)

    @functools.cached_property
    def even_batches(self) -> list[list[int]]:
        """Prompts that are one batch without padding."""
        return together(self.prompts, ragged=False)

    def of_prompts(self, batch: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers of the requests (B,) with these prompts, and the tokens of each, None where all are as long."""
        ends = [self.prompts[i].stop_in_request for i in batch]
        lengths = async_tensor_h2d(ends, dtype=torch.long, device=device) if min(ends) < max(ends) else None
        requests = [self.num_decodes + i for i in batch]
        return async_tensor_h2d(requests, dtype=torch.long, device=device), lengths

    def opening_rows(self, shape: BlockShape, device: torch.device) -> torch.Tensor | None:
        """Rows of those that decode in which a block is to be opened, if any."""
        if shape.window not in self.opening:
            rows = [i for i, n in enumerate(self.decoding) if n % shape.block == 0 and n >= shape.window]
            self.opening[shape.window] = async_tensor_h2d(rows, dtype=torch.long, device=device) if rows else None
        return self.opening[shape.window]


def steps_in_graphs(vllm_config: VllmConfig) -> AttentionCGSupport:
    """Steps of a token of each request, where nothing in them depends on the host: with kernels that read pages, on a
    GPU; on a CPU, where the functions in C do, vLLM records no steps.

    Prompts, of any lengths, are left out: graphs hold what lies between layers.
    """
    model = vllm_config.model_config
    like = torch.empty(0, dtype=model.dtype, device=vllm_config.device_config.device)
    if backend_for(like, model.hf_config.backend).attends_to_pages:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.NEVER


class SlotMetadataBuilder(BaseMambaAttentionMetadataBuilder[SlotMetadata]):
    """Counts on the CPU, once for all layers of a step."""

    metadata_cls = SlotMetadata
    needs_causal_conv1d_metadata = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec) -> AttentionCGSupport:
        """Kinds of steps that vLLM may record whole."""
        return steps_in_graphs(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False, **kwargs
    ) -> SlotMetadata:
        """Metadata that `SlotLayer` reads at each step."""
        metadata = self._compute_common_metadata(common_attn_metadata)
        ends = common_attn_metadata.query_start_loc_cpu.tolist()
        # exact here: it exceeds a length only with speculative decoding, which `refuse` excludes
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
        spans = [Span(s, e, n - (e - s)) for s, e, n in zip(ends, ends[1:], lengths, strict=False)]
        decodes = spans[: metadata.num_decodes]
        prompts = spans[metadata.num_decodes :]
        metadata.prompts = prompts[: metadata.num_prefills]
        metadata.decoding = [span.seen for span in decodes]
        return metadata


class SlotBackend(AttentionBackend):
    """Backend whose builder makes `SlotMetadata`."""

    @staticmethod
    def get_name() -> str:
        return "HYBRID_SLOTS"

    @staticmethod
    def get_builder_cls() -> type[SlotMetadataBuilder]:
        return SlotMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


@dataclass(frozen=True)
class SlotSpec(MambaSpec):
    """Specification of pages of which a request holds one each.

    vLLM counts two where prefixes are shared. The older is the state at the last block's end, which the next step
    gives back to the pool, so that it takes the place of no request.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of a request."""
        return self.page_size_bytes


class SlotPage(MambaBase):
    """A page of requests' slots, to vLLM the state of a Mamba layer.

    Args:
        bound: called when vLLM has given the page its memory.
    """

    def __init__(self, prefix: str, size: int, vllm_config: VllmConfig, bound: Callable[[], None]):
        self.prefix = prefix
        self.bound = bound
        self.size = size
        self.kv_cache = ()
        self.first_row = 0
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """A state as large as a page, so that vLLM has nothing to pad."""
        spec = super().get_kv_cache_spec(vllm_config)
        return SlotSpec(**vars(replace(spec, page_size_padded=None)))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One tensor: vLLM copies pages for prefixes that are shared, and requires as many tensors of each layer."""
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


class HeadMetadata(NamedTuple):
    """Places of the rows of a step's requests.

    table: (requests, most pages), the pages of each. places: (L,), the number of each token's place. lengths:
    (requests,), the tokens of each with those of the step; 0 of requests that fill up a graph.
    """

    table: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor


class HeadMetadataBuilder(AttentionMetadataBuilder[HeadMetadata]):
    """Passes on vLLM's own table of pages and the place of each token."""

    # abstract in vLLM's class, so that a builder without one could not be made
    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec) -> AttentionCGSupport:
        """Kinds of steps that vLLM may record whole."""
        return steps_in_graphs(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HeadMetadata:
        """Metadata that `HeadRows` read at each step."""
        tokens = common_attn_metadata.num_actual_tokens
        return HeadMetadata(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.slot_mapping[:tokens],
            common_attn_metadata.seq_lens,
        )


class HeadBackend(SlotBackend):
    """Backend whose builder makes `HeadMetadata`."""

    @staticmethod
    def get_builder_cls() -> type[HeadMetadataBuilder]:
        return HeadMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return False


class HeadPages(AttentionLayerBase):
    """The pages of all kept heads, to vLLM those of an attention layer with one head.

    Args:
        bound: called when vLLM has given the pages their memory.
    """

    def __init__(self, prefix: str, sizing: Sizing, vllm_config: VllmConfig, bound: Callable[[], None]):
        self.prefix = prefix
        self.sizing = sizing
        self.bound = bound
        self.kv_cache = ()
        self.block = sizing.block(vllm_config.cache_config.block_size)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Rows of bytes, as if each were a key and a value."""
        return FullAttentionSpec(
            block_size=self.block, num_kv_heads=1, head_size=self.sizing.keys, head_size_v=self.sizing.values,
            dtype=torch.uint8, page_size_padded=self.sizing.page(self.block),
        )  # fmt: skip

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's pages (pages, 1, tokens, bytes), whole: of a new one vLLM makes zeros, also for attention of its
        own, which multiplies numbers of no token by zero, so that none may be NaN."""
        assert kv_cache.storage_offset() == 0
        size = kv_cache.stride(0)
        self.kv_cache = kv_cache.as_strided((len(kv_cache), size), (size, 1))
        self.bound()

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Backend whose builder makes `HeadMetadata`, for vLLM."""
        return HeadBackend


class HeadRows:
    """Rows of a layer's kept heads in the pages.

    Args:
        heads: their number. first: byte of a page at which they begin. roundings: of keys and of values. dtype: the
            model's.
    """

    def __init__(
        self, memory: "RequestMemory", heads: int, first: int, roundings: tuple[Rounding, Rounding], dtype: torch.dtype
    ):
        self.memory = memory
        self.heads = heads
        self.roundings = roundings
        self.types = [torch.uint8 if rounding.rounds else dtype for rounding in roundings]
        ends = [first]
        for rounding in roundings:
            ends.append(ends[-1] + memory.heads.block * heads * rounding.width(dtype))
        self.firsts = tuple(ends[:2])
        self.regions = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]

    @property
    def metadata(self) -> HeadMetadata:
        """Metadata of the present step: where its requests' rows are."""
        return get_forward_context().attn_metadata[self.memory.heads.prefix]

    def write(self, *rows: torch.Tensor) -> None:
        """Put the rows of the step's tokens, (1, K, L, .) of keys and of values, into their places."""
        block = self.memory.heads.block
        # requests that fill up a graph have no places, and may write to vLLM's page of none
        places = self.metadata.places.clamp(min=0)
        page, place = places // block, places % block
        for new, region in zip(rows, self.regions, strict=True):
            of_tokens = self.memory.memory[:, region].unflatten(1, (block, -1))
            of_tokens[page, place] = new[0, :, : len(places)].transpose(0, 1).flatten(1).view(torch.uint8)

    def read(self, requests: torch.Tensor | slice, length: int, lengths: torch.Tensor | None) -> list[torch.Tensor]:
        """Rows (B, K, length, .) of keys and of values of some requests.

        Args:
            lengths: (B,), the tokens of each where some have less than others. What is read behind them is zero: it
                may be another request's, which is no number in this type.
        """
        block = self.memory.heads.block
        table = self.metadata.table[requests, : -(-length // block)]
        found = []
        for dtype, region in zip(self.types, self.regions, strict=True):
            words = self.memory.words[:, region.start // 8 : region.stop // 8].index_select(0, table.flatten())
            rows = words.view(dtype).view(len(table), table.shape[1] * block, self.heads, -1)
            rows = rows[:, :length].transpose(1, 2)
            if lengths is not None:
                behind = torch.arange(length, device=rows.device) >= lengths[:, None]
                rows = rows.masked_fill(behind[:, None, :, None], 0)
            found.append(rows)
        return found


class RequestMemory:
    """Memory of all layers of a model.

    pages: of the slots. heads: the pages of kept heads, or None. memory: all pages (rows, bytes); words: the same by
    eight bytes, which are copied faster. first_rows: of each page of the slots, the row of the first request. layers:
    `ready()` of each is called when there is memory.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str):
        self.vllm_config = vllm_config
        self.dtype = vllm_config.model_config.dtype
        self.roundings = kept_roundings(vllm_config)
        sizing = Sizing.of(vllm_config)
        # vLLM lengthens its blocks to these once the model is made
        size = sizing.page(sizing.block(vllm_config.cache_config.block_size))
        self.memory = self.words = self.first_rows = None
        self.layers = []
        self.heads = None
        name = f"{prefix}.layers.0"  # vLLM wants to find the number of a layer
        if sizing.keys:
            self.heads = HeadPages(f"{name}.heads", sizing, vllm_config, self._bound)
        count = -(-sizing.slots // size)
        self.pages = [SlotPage(f"{name}.page{i}", size, vllm_config, self._bound) for i in range(count)]
        self.slots_end = self.heads_end = 0

    def add_slot(self, layer: int) -> tuple[Sizes, int]:
        """Sizes of a layer's slot, and the byte at which it begins."""
        sizes = sizes_of(self.vllm_config.model_config.hf_config, layer, self.dtype)
        first = self.slots_end
        self.slots_end += bytes_of(sizes)
        return sizes, first

    def add_rows(self, layer: int) -> HeadRows | None:
        """Rows of a layer's heads; None where it has none."""
        count = heads_in_rows(self.vllm_config, layer)
        if count == 0:
            return None
        rows = HeadRows(self, count, self.heads_end, self.roundings, self.dtype)
        self.heads_end = rows.regions[-1].stop
        return rows

    def _bound(self) -> None:
        owners = [*self.pages, *([self.heads] if self.heads else [])]
        if any(len(owner.kv_cache) == 0 for owner in owners):
            return
        last = self.pages[-1]
        whole = torch.empty(0, dtype=torch.uint8, device=last.kv_cache[0].device)
        whole.set_(last.kv_cache[0].untyped_storage())
        self.memory = whole[: len(whole) // last.size * last.size].view(-1, last.size)
        self.words = self.memory.view(torch.int64)
        self.first_rows = torch.tensor([page.first_row for page in self.pages], device=whole.device)
        for layer in self.layers:
            layer.ready()

    def metadata(self) -> SlotMetadata | None:
        """Metadata of the present step; None while vLLM measures memory."""
        found = get_forward_context().attn_metadata
        return None if found is None else found[self.pages[0].prefix]

    def rows(self, decode: bool) -> torch.Tensor:
        """Rows of memory (B, pages) of the requests that decode, or of those whose prompts are read."""
        step = self.metadata()
        if decode not in step.rows:
            found = get_forward_context().attn_metadata
            pages = [found[page.prefix].pages(decode) for page in self.pages]
            step.rows[decode] = torch.stack(pages, dim=1) + self.first_rows
        return step.rows[decode]
