"""Layers that go on from what requests hold, in the slots and pages of pages.py.

A step copies the slots of its requests into one tensor, works there, and writes them back; on a CPU functions in C
compute a token of each request in the pages themselves (cpu_pages.py). vLLM runs the tokens of all requests as one
row: first a token each of those that decode, then the prompts that are read, or parts of them. Those that decode are
one batch here, and prompts that begin at the same token are batches of like lengths (`together`). A slot of a hybrid
layer holds the tensors of `Held`, from which the layer's own `prompt` and `step` go on. Its kept heads write the rows
of all tokens into their pages, and attend to what they then read from there.

Shapes: B batch (requests), L length, H' heads with a window, K key/value heads, P head dim, E block, S places, T
columns, W bytes of a row.
"""

from itertools import accumulate
from math import prod

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from modeling_llamba.hybrid.eviction import Held
from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.hybrid_cache import HybridLayer
from modeling_llamba.hybrid.inputs import HybridInputs, Projected
from modeling_llamba.hybrid.prompt import read_prompt
from modeling_llamba.hybrid.rounding import DECODED, WHOLE, Rounding
from modeling_llamba.kernels.backend import backend_for
from modeling_llamba.kernels.softmax import attend, causal_attend, fuses, hiding, merged
from modeling_llamba.model.attention import SoftmaxAttention, TeacherAttention
from modeling_llamba.model.rotary import Rotary

from .cpu_pages import SlotStep, runs_in_c
from .pages import HeadRows, RequestMemory, SlotMetadata, Slots, Span, batched, bytes_of


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


class SlotLayer(nn.Module):
    """A layer that goes on from slots; takes the place of the one that it holds.

    A kind of layer has `forward`, which hands tensors (1, L, ...) to `in_slots`, and `prompt` and `decode`, which
    write what `in_slots` returns. paddings: what of each of these tensors stands behind a prompt that is shorter than
    others of its batch; None where none may be. Rows (B, pages) say where in memory the pages of requests lie.
    """

    paddings: list[float] | None = None

    def __init__(self, mixer: nn.Module, number: int, memory: RequestMemory, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.mixer = mixer
        self.number = number
        self.prefix = prefix
        self.memory = memory
        self.sizes, self.first = memory.add_slot(number)
        memory.layers.append(self)
        self.bytes = bytes_of(self.sizes)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def ready(self) -> None:
        """Find the parts of the slot, for each its page and its words there."""
        size = self.memory.words.shape[1]
        first, last = self.first // 8, (self.first + self.bytes) // 8
        self.parts = []
        for page in range(first // size, -(-last // size)):
            start = page * size
            self.parts.append((page, slice(max(first - start, 0), min(last - start, size))))

    def fetch(self, rows: torch.Tensor) -> tuple[torch.Tensor, Slots]:
        """Bytes (B, bytes) of requests' slots, and the tensors that they are."""
        words = [self.memory.words[:, part].index_select(0, rows[:, page]) for page, part in self.parts]
        content = (words[0] if len(words) == 1 else torch.cat(words, dim=1)).view(torch.uint8)
        return content, self.cut(content)

    def empty(self, requests: int) -> tuple[torch.Tensor, Slots]:
        """`fetch` for requests that have no slots yet."""
        # what is left of a page may be attention's next, which multiplies numbers of no token by zero: none may be NaN
        content = self.memory.memory.new_zeros(requests, self.bytes)
        return content, self.cut(content)

    def first_bytes(self) -> dict[str, int]:
        """The first byte of each tensor of a slot, among all slots of a request."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in self.sizes.values()]
        return dict(zip(self.sizes, accumulate(sizes, initial=self.first), strict=False))

    def cut(self, content: torch.Tensor) -> Slots:
        """The tensors in slots (B, bytes)."""
        slots = {}
        for (name, (shape, dtype)), first in zip(self.sizes.items(), self.first_bytes().values(), strict=True):
            start = first - self.first
            slots[name] = content[:, start : start + prod(shape) * dtype.itemsize].view(dtype).view(-1, *shape)
        return slots

    def store(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        """Write whole slots (B, bytes)."""
        words = content.view(torch.int64).split([part.stop - part.start for _, part in self.parts], dim=1)
        for (page, part), own in zip(self.parts, words, strict=True):
            self.memory.words[rows[:, page], part] = own

    def in_slots(self, inputs: list[torch.Tensor], width: int) -> torch.Tensor:
        """(1, L, width) from tensors (1, L, ...) of all requests' tokens in one row."""
        # zeros, since the first tokens, all within the window, have no features for their part of the width
        output = inputs[-1].new_zeros(*inputs[-1].shape[:2], width)
        torch.ops.vllm.hybrid_slots(inputs, output, self.prefix)
        return output

    def run(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Run a layer from slots: each request goes on from its own."""
        metadata = self.memory.metadata()
        if metadata is None:  # vLLM measures memory
            self.prompt(inputs, output, None, 0, padded=False)
            return
        decodes = metadata.num_decodes
        if decodes:
            self.decode([t[0, :decodes, None] for t in inputs], output[0, :decodes, None], metadata)
        if metadata.num_prefills:
            rows = self.memory.rows(decode=False)
            for batch in metadata.even_batches if self.paddings is None else metadata.ragged_batches:
                self._prompts(inputs, output, [metadata.prompts[i] for i in batch], rows[batch])

    def _prompts(
        self, inputs: list[torch.Tensor], output: torch.Tensor, spans: list[Span], rows: torch.Tensor
    ) -> None:
        """Prompts of some requests, as one batch."""
        paddings = self.paddings or [0.0] * len(inputs)
        batch = [batched(t, spans, padding) for t, padding in zip(inputs, paddings, strict=True)]
        if len(spans) == 1:
            mixed = output[:, spans[0].start : spans[0].stop]
        else:
            mixed = output.new_zeros(len(spans), spans[0].length, output.shape[2])
        padded = spans[-1].length < spans[0].length  # the longest is the first
        self.prompt(batch, mixed, rows, spans[0].seen, padded)
        if len(spans) > 1:
            for row, span in zip(mixed, spans, strict=True):
                output[0, span.start : span.stop] = row[: span.length]


class MixerSlots(SlotLayer):
    """A mixer."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Rotary, *nothing: None) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden)."""
        return self.in_slots([*position_embeddings, hidden_states], hidden_states.shape[-1])

    def prompt(
        self, inputs: list[torch.Tensor], output: torch.Tensor, rows: torch.Tensor | None, seen: int, padded: bool
    ) -> None:
        """Tokens (B, L, ...) of requests, which `seen` others precede in each; none is padded."""
        if rows is None:
            self._mix(inputs, output, None)
            return
        content, slots = self.fetch(rows) if seen else self.empty(len(rows))
        self._mix(inputs, output, MixerCache(slots, seen > 0))
        self.store(rows, content)

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request."""
        rows = self.memory.rows(decode=True)
        content, slots = self.fetch(rows)
        self._mix(inputs, output, MixerCache(slots, begun=True))
        self.store(rows, content)

    def _mix(self, inputs: list[torch.Tensor], output: torch.Tensor, cache: MixerCache | None) -> None:
        *rotary, hidden_states = inputs
        output.copy_(self.mixer(hidden_states, rotary, cache=cache))
        if cache is not None:
            cache.write()


class HybridSlots(SlotLayer):
    """A hybrid layer.

    Padding has no number and no salience, so that nothing of it is held.
    """

    paddings = [-1, -torch.inf, 0.0]

    def __init__(
        self, mixer: HybridAttention, number: int, memory: RequestMemory, vllm_config: VllmConfig, prefix: str
    ):
        super().__init__(mixer, number, memory, vllm_config, prefix)
        self.reach = mixer.config.hybrid_sink_reach
        self.kept_size = len(mixer.kept) * mixer.shared * mixer.head_dim
        rows = memory.add_rows(number)
        self.kept_heads = None if rows is None else KeptHeads(mixer, rows, memory)
        self.slot_step: SlotStep | None = None

    def ready(self) -> None:
        """Find functions in C for a step if they run here."""
        super().ready()
        attention, dtype = self.mixer, self.memory.dtype
        if attention.mass is not None and runs_in_c(self.memory.memory, dtype, attention.config.backend):
            self.slot_step = SlotStep(attention, self.first_bytes(), dtype)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotary, inputs: HybridInputs, *nothing: None
    ) -> torch.Tensor:
        """(1, L, hidden) -> (1, L, hidden)."""
        attention = self.mixer
        projected = attention.project(hidden_states, position_embeddings, inputs)
        new = attention.select_windowed(projected)
        heads = torch.cat([t for t in new[:4] if t is not None], dim=1).transpose(1, 2)
        kept = []
        if attention.kept:
            kept = [t.transpose(1, 2) for t in attention.select_kept(projected)]
        size = new.query[0, :, 0].numel()
        rank = 0 if attention.down is None else attention.down.out_features
        mixed = self.in_slots([inputs.index, new.salience, *kept, heads], size + rank + self.kept_size)
        output, features, of_kept = mixed.split([size, rank, self.kept_size], dim=-1)
        output, of_kept = (t.unflatten(2, (-1, attention.head_dim)) for t in (output, of_kept))
        output = attention.project_out(output, of_kept if attention.kept else None, None)
        return output if rank == 0 else output + attention.up(features)

    def run(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Run the kept heads from their pages, and the others from the slots."""
        if self.kept_heads is not None:
            index, salience, *kept, heads = inputs
            inputs = [index, salience, heads]
            output[..., -self.kept_size :] = self.kept_heads.attend(*kept).flatten(2)
            output = output[..., : -self.kept_size]
        super().run(inputs, output)

    def prompt(
        self, inputs: list[torch.Tensor], output: torch.Tensor, rows: torch.Tensor | None, seen: int, padded: bool
    ) -> None:
        """Tokens (B, L, ...) of requests, which `seen` others precede in each.

        Args:
            padded: True if there is padding behind some of them, where the index is -1.
        """
        index = inputs[0]
        if seen + index.shape[1] <= self.reach:
            inputs = self._without_far_sinks(inputs)
        projected = projected_of(self.mixer, *inputs[1:])
        inputs = HybridInputs(index, start=seen, end_alike=not padded)
        if rows is None:
            self._give(output, *self._read(projected, inputs, None))
            return
        cache = HybridLayer(self.mixer.shape)
        content, slots = self.fetch(rows) if seen else self.empty(len(rows))
        cache.held = held_in(slots, index[:, 0]) if seen else None
        self._give(output, *self._read(projected, inputs, cache))
        put(slots, cache.held)
        self.store(rows, content)

    def _read(self, projected: Projected, inputs: HybridInputs, layer: HybridLayer | None):
        backend = backend_for(projected.query, self.mixer.config.backend)
        return read_prompt(backend, self.mixer.heads(), projected, inputs, layer)

    def decode(self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata) -> None:
        """One token of each request; a CUDA graph may hold all of it but the step in C."""
        rows = self.memory.rows(decode=True)
        if self.slot_step is not None:
            self._step_in_c(inputs, output, metadata, rows)
            return
        index, *others = inputs
        content, slots = self.fetch(rows)
        cache = HybridLayer(self.mixer.shape)
        # counted on in place, as vLLM's own numbers must not be
        cache.held = held_in({name: t.contiguous() for name, t in slots.items()}, index[:, 0].clone())
        self._give(output, *self.mixer.attend(projected_of(self.mixer, *others), HybridInputs(index), cache))
        put(slots, cache.held)
        self.store(rows, content)

    def _step_in_c(
        self, inputs: list[torch.Tensor], output: torch.Tensor, metadata: SlotMetadata, rows: torch.Tensor
    ) -> None:
        opening = metadata.opening_rows(self.mixer.shape, rows.device)
        if opening is not None:
            self._open_block(rows[opening], opening)
        if max(metadata.decoding) < self.reach:
            inputs = self._without_far_sinks(inputs)
        self._give(output, *self.slot_step(self.memory.memory, rows, *inputs))

    def _open_block(self, rows: torch.Tensor, requests: torch.Tensor) -> None:
        """Open a block in the slots of some requests (B,)."""
        content, slots = self.fetch(rows)
        shape, held = self.mixer.shape, held_in(slots, requests)
        opened = backend_for(held.salience, shape.key_rounding.backend).open_blocks(
            held, shape, torch.full_like(requests, shape.window), in_all_rows=True
        )
        if opened.keys is not held.keys:
            put(slots, opened)
        self.store(rows, content)

    def _has_far_sinks(self, inputs: list[torch.Tensor]) -> bool:
        """True if there are queries to sinks that are farther away than the teacher was trained for."""
        K, shared = self.mixer.heads().groups
        return inputs[2].shape[2] > K * (shared + 2)

    def _without_far_sinks(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Leave these queries out: of tokens that no sink is so far from, they are the others' equal."""
        if not self._has_far_sinks(inputs):
            return inputs
        K, shared = self.mixer.heads().groups
        index, salience, heads = inputs
        return [index, salience, torch.cat([heads[:, :, : K * shared], heads[:, :, 2 * K * shared :]], dim=2)]

    def _give(self, output: torch.Tensor, of_heads: torch.Tensor, features: torch.Tensor | None) -> None:
        """Write (B, L, H', P) and what the low-rank map makes of the features of the last tokens, (B, L', 3 H' P),
        into the output, which is zero."""
        of_heads = of_heads.flatten(2)
        size = of_heads.shape[2]
        output[..., :size] = of_heads
        if features is not None and size < output.shape[2]:
            output[:, output.shape[1] - features.shape[1] :, size:] = self.mixer.down(features)


class KeptHeads:
    """Full attention of heads whose keys and values lie in pages.

    Args:
        attention: their layer. rows: of its heads.
    """

    def __init__(self, attention: TeacherAttention, rows: HeadRows, memory: RequestMemory):
        self.rows = rows
        self.memory = memory
        self.setting = attention.config.backend
        self.scores = attention.scaling, attention.softcap

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention (1, L, heads, P) of queries (1, L, heads, P), whose keys and values (1, L, K, P) are written into
        their places first."""
        rows, metadata = self.rows, self.memory.metadata()
        pairs = zip(rows.roundings, (key, value), strict=True)
        own = [rounding.encode(t.transpose(1, 2)) for rounding, t in pairs]
        if metadata is None:  # vLLM measures memory
            return self._attend_prompts(query, *own)
        rows.write(*own)
        output = torch.zeros_like(query)
        decodes = metadata.num_decodes
        if decodes:
            output[0, :decodes] = self._attend_decoding(metadata, query[0, :decodes, :, None])[:, 0]
        for batch in metadata.ragged_batches:
            longest = metadata.prompts[batch[0]].stop_in_request
            at_once = max(DECODED // (longest * query.shape[3]), 1)
            for first in range(0, len(batch), at_once):
                self._read_prompts(metadata, batch[first : first + at_once], query, output)
        return output

    def _read_prompts(
        self, metadata: SlotMetadata, batch: list[int], query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attention of prompts with these numbers, into their part of the output."""
        spans = [metadata.prompts[i] for i in batch]
        requests, lengths = metadata.of_prompts(batch, query.device)
        held = self.rows.read(requests, spans[0].stop_in_request, lengths)
        found = self._attend_prompts(batched(query, spans, 0.0), *held)
        for mixed, span in zip(found, spans, strict=True):
            output[0, span.start : span.stop] = mixed[: span.length]

    def _attend_prompts(self, query: torch.Tensor, *of_rows: torch.Tensor) -> torch.Tensor:
        """Attention (B, L, heads, P) of prompts (B, L, heads, P) to rows (B, K, T, W), which end with their own."""
        of_keys, of_values = self.rows.roundings
        query = of_keys.rotate(query.transpose(1, 2))
        batch, heads, columns = of_rows[0].shape[:3]
        at_once = max(DECODED // (batch * columns * of_keys.dim), 1)
        shared = query.shape[1] // heads
        parts = []
        for of_part, *rows in zip(
            query.split(at_once * shared, 1), *(t.split(at_once, 1) for t in of_rows), strict=True
        ):
            pairs = zip(self.rows.roundings, rows, strict=True)
            held = (rounding.decode(t, query.dtype, rotated=True) for rounding, t in pairs)
            parts.append(attend_causally(of_part, *held, *self.scores))
        return of_values.rotate(torch.cat(parts, dim=1).transpose(1, 2))

    def _attend_decoding(self, metadata: SlotMetadata, query: torch.Tensor) -> torch.Tensor:
        """Attention (B, 1, heads, P) of a token of each request (B, heads, 1, P)."""
        rows = self.rows
        requests = slice(len(query))
        # a request that fills up a graph attends to one token, since there is no softmax of none
        lengths = rows.metadata.lengths[requests].long().clamp(min=1)
        scaling, softcap = self.scores
        backend = backend_for(query, self.setting)
        if backend.attends_to_pages:
            table = rows.metadata.table[requests], lengths, rows.memory.heads.block
            scores = scaling, softcap or 0.0
            return backend.attend_to_pages(
                query, self.memory.memory, rows.firsts, rows.heads, *table, *scores, rows.roundings
            )
        longest = max(metadata.decoding) + 1
        bias = hiding(torch.arange(longest, device=query.device) >= lengths[:, None], query.dtype)
        return backend.attend_to_rows(
            query, *rows.read(requests, longest, lengths), rows.roundings, bias, *self.scores
        )


class RoundedAttention:
    """A layer of full attention whose heads are all kept, where vLLM would have its own.

    Args:
        attention: the layer, whose own rounding is turned off, since its rows round.
    """

    def __init__(
        self, attention: SoftmaxAttention, rows: HeadRows, memory: RequestMemory, vllm_config: VllmConfig, prefix: str
    ):
        self.kept_heads = KeptHeads(attention, rows, memory)
        self.prefix = prefix
        attention.roundings = Rounding.of_pair(WHOLE, attention.head_dim)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def __call__(self, *heads: torch.Tensor) -> torch.Tensor:
        """(L, heads P) from queries of this shape, keys and values (L, K P)."""
        output = torch.zeros_like(heads[0])
        torch.ops.vllm.hybrid_slots(list(heads), output, self.prefix)
        return output

    def run(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Attend to rows in their pages."""
        dim = self.kept_heads.rows.roundings[0].dim
        heads = (t.unflatten(1, (-1, dim))[None] for t in inputs)
        output.copy_(self.kept_heads.attend(*heads)[0].flatten(1))


SCORES = 2**26
"""Scores that are computed at once, as far as those of one token are not more, where nothing fused attends: behind
earlier tokens on a GPU, and with a cap. When vLLM measures memory, there are no earlier tokens."""


def attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Attention (B, heads, L, P) of queries of the last L tokens, to keys and values (B, K, T, P) of all."""
    length, past, shared = query.shape[2], keys.shape[2] - query.shape[2], query.shape[1] // keys.shape[1]
    # the causal mask of SDPA begins at the first key, which is wrong behind a past, and SDPA has no cap
    if past == 0 and softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=shared > 1
        )
    scores = scaling, softcap
    fused = softcap is None and fuses(query, keys, values)
    at_once = length if fused else max(SCORES // (len(query) * query.shape[1] * keys.shape[2]), 1)
    if length > at_once:
        parts = []
        for part in query.split(at_once, dim=2):
            past += part.shape[2]
            parts.append(attend_causally(part, keys[:, :, :past], values[:, :, :past], *scores))
        return torch.cat(parts, dim=2)
    own = (t[:, :, past:] for t in (keys, values))
    near = causal_attend(query, *own, *scores)
    if past:
        by_kv_head = query.unflatten(1, (-1, shared)).flatten(2, 3)
        near = merged(near, attend(by_kv_head, keys[:, :, :past], values[:, :, :past], None, *scores))
    return near[0].unflatten(2, (shared, length)).flatten(1, 2)


def projected_of(attention: HybridAttention, salience: torch.Tensor, heads: torch.Tensor) -> Projected:
    """Inputs that `HybridSlots.forward` has put together."""
    heads = heads.transpose(1, 2)
    K, shared = attention.heads().groups
    queries, key, value = heads.split([heads.shape[1] - 2 * K, K, K], dim=1)
    query, *sink_query = queries.split(K * shared, dim=1)
    rows = attention.rows_of(key, value)
    return Projected(query, sink_query[0] if sink_query else None, key, value, salience, *rows)


def hybrid_slots(inputs: list[torch.Tensor], output: torch.Tensor, layer_name: str) -> None:
    """The layer of that name; an operator of its own, as tracing cannot look into slots."""
    get_forward_context().no_compile_layers[layer_name].run(inputs, output)


# rows of bytes are viewed as other types, which strides of inductor's own choice would not allow
STRIDES = (torch.Tag.needs_exact_strides,)
direct_register_custom_op(op_name="hybrid_slots", op_func=hybrid_slots, mutates_args=["output"], tags=STRIDES)
