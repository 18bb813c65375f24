"""A hybrid layer: softmax attention to a window that moves in blocks, to sinks and salient tokens, and to a state.

The query q of a token in block b of its sequence attends to

    window    the tokens of blocks b - n .. b up to its own
    salient   the S first tokens (sinks) and the R most salient of those that have left the window
    state     all other tokens, of which only sums are held (eviction.py): their number m and, over them, the means of
              v and of the slow part k' of k, and C = Cov(v, k')

With y and Z, the output and the log-sum-exp of softmax attention to window and salient tokens, and with q holding the
factor 1 / sqrt(P) (or the teacher's own):

    log mass = c0 + c1 log m + sum_f alpha_f (q' . mean k')_f + sum_f beta_f (q . q)_f
    g        = sigmoid(log mass - Z), 0 while the state is empty
    far      = mean v + C q'
    output   = W_o [y + g (far - y)] + up(down([g y, g mean v, g far]))

Were the keys and values of the state jointly Gaussian and all of a key slow, softmax over them would return `far` with
the log mass log m + q . mean k + q^T Cov(k, k) q / 2. They are not, so c0, c1, alpha, beta of each
head and the low-rank map up(down(.)) are fitted (convert/fit). (.)_f is the part of a product in plane f of the
rotary embedding or in a dimension that is not rotated, so that the mass depends on distances alone. W_o is the
teacher's own, and g = 0 for the first (n + 1) E tokens of a sequence: there the layer is its teacher's attention.
A learned sink of a head, where the teacher has one, is a column of that softmax with a score and no value: Z holds it.
Kept heads are full attention for every token. Where the teacher has gates on what its heads return, y, mean v and far
are multiplied by them before either projection.

A prompt is computed as follows, for all blocks at once:

    1. project; kept heads attend to everything.
    2. blocks 0 .. n: causal attention.
    3. for each later block: which tokens hold a place in the salient cache (`salient_before`), hence from which block
       on a token is no longer attended to (`until`).
    4. GROUP tokens at a time: one fused attention over salient cache and window, masked by `until`, with Z.
    5. for each block: its state, a running sum over the blocks that left, less the tokens that hold a place.
    6. read the state, mix, project out.

On CUDA Triton kernels around flex_attention do 3 to 5, and read and mix (hybrid_prompt_kernel.py); on a CPU functions
in C do 3, 5, and read and mix (cpu_prompt_kernels.py).

A step writes one column and does 4 to 6 for one query; a block is opened every E steps. The ground truth is naive.py.

Shapes: B batch, L length, D model width, H heads, H' heads with a window, K key/value heads, R heads per key/value
head, P head dim, N state, F planes and other dims, F' slow planes and other slow dims, E block, n whole blocks, S
places, T columns, M mixed blocks, J groups of blocks, Q queries.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_compiling

from ..kernels.cpu_kernels import can_run_on_cpu, mix_one_on_cpu
from ..kernels.cpu_prompt_kernels import mix_blocks_on_cpu
from ..kernels.flex import attend_by_flex, can_flex
from ..kernels.hybrid_prompt_kernel import (
    fits,
    hold,
    in_tiles,
    last_places,
    lose_columns,
    mix_blocks,
    numbered_slots,
    visible_tiles,
)
from ..kernels.hybrid_step_kernel import can_run, mix_one, on_device_of
from ..mixers.ssd import requested_backend
from ..model.attention import (
    FUSED_ON_CPU,
    TeacherAttention,
    append_keys,
    attend_rounded,
    fuses_on_cpu,
    hiding,
)
from ..model.rotary import Rotary, rotate_queries
from .block_layout import Blocks, Layout
from .eviction import BlockShape, Held, NewTokens, State, advance, decoded, gather_columns, open_block, open_blocks
from .rounding import WHOLE, Rounding

SEGMENT = 4096
"""Tokens of a prompt whose states and masks lie in memory at once."""
KERNEL_SEGMENT = 32768
"""Number of such tokens where kernels do the work, which hold a state for each 256 tokens alone."""


class HybridInputs(NamedTuple):
    """Places of a pass's tokens in their sequences, the same for all hybrid layers.

    index (B, L): number of each token in its sequence, -1 at padding. start: number of the first token, where rows are
    not packed, hold no padding but behind their last token, and are known to begin with the same number; else None.
    end_alike: False where there may be padding behind the last token of rows with a `start`.
    seq_idx (B, L): sequence of each token in packed rows, else None. sink_rotary: rotary embedding (rotary.py) for
    queries to sinks that are farther away than the teacher was trained for, by kind of rotary embedding until
    `of_layer`; None where none is.
    causal_mask: mask of transformers' for kept heads.
    """

    index: torch.Tensor
    start: int | None = None
    seq_idx: torch.Tensor | None = None
    sink_rotary: dict[str, Rotary] | Rotary | None = None
    causal_mask: torch.Tensor | None = None
    end_alike: bool = True

    def of_layer(self, rope: str) -> "HybridInputs":
        """The inputs of a layer with this kind of rotary embedding."""
        if self.sink_rotary is None:
            return self
        return self._replace(sink_rotary=self.sink_rotary[rope])


def unpadded(hidden_states: torch.Tensor) -> HybridInputs:
    """The inputs for rows (B, L, D) that begin here and hold no padding."""
    index = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    return HybridInputs(index.expand(hidden_states.shape[0], -1), start=0)


class Projected(NamedTuple):
    """Queries, keys and values of all heads, rotated; keys are less their offset.

    query (B, H, L, P). sink_query: the same for sinks that are too far away, or None. key, value (B, K, L, P).
    salience (B, L) in float32 or wider: +inf at sinks, -inf at padding. key_rows, value_rows: keys and values as a
    cache holds them, for heads with a window alone; the same tensors where nothing is rounded.
    """

    query: torch.Tensor
    sink_query: torch.Tensor | None
    key: torch.Tensor
    value: torch.Tensor
    salience: torch.Tensor
    key_rows: torch.Tensor | None = None
    value_rows: torch.Tensor | None = None

    def tokens(self, index: torch.Tensor) -> NewTokens:
        """Tokens with these numbers (B, L), as a cache takes them."""
        return NewTokens(self.key_rows, self.value_rows, self.salience, index)


class Near(NamedTuple):
    """Softmax attention of the blocks of a layout.

    query, output (B, J, K, M/J, R, E, P). log_mass (B, J, K, M/J, R, E): Z. keys, values (B, K, T, P): the columns.
    state: (B, J, K, M/J, .) each, or None in a layer without one or where it is left out. until (B, T): the first
    block to which a column is visible neither in a window nor in a place. after: what is held afterwards, where that
    was asked for.
    """

    query: torch.Tensor
    output: torch.Tensor
    log_mass: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    state: State | None
    until: torch.Tensor
    after: Held | None = None


class Readout(NamedTuple):
    """A state as the queries of each head read it, in float32 or wider; q is not scaled here.

    constant (..., K, R, 1): c0 + c1 log m, -inf while the state is empty. linear (..., K, R, 1, P): what the log mass
    takes from q itself, alpha times the mean of k'. quadratic (K, ..., R, 1, P): beta. value_mean (..., K, 1, 1, P).
    covariance (..., K, P, P): q times it is C q'.
    """

    constant: torch.Tensor
    linear: torch.Tensor
    quadratic: torch.Tensor
    value_mean: torch.Tensor
    covariance: torch.Tensor


def theory_mass(config, layer: int) -> torch.Tensor:
    """The mass of a state whose keys are all alike: c0 = 0, c1 = 1, alpha = 1, beta = 0; (H', 2 + F' + F), F' slow."""
    slow_parts = config.state_keys(layer) - config.state_planes(layer)
    heads = config.num_attention_heads - len(config.full_heads_of(layer))
    mass = torch.zeros(heads, 2 + slow_parts + config.head_dim - config.rotary_planes)
    mass[:, 1 : 2 + slow_parts] = 1.0
    return mass


class HybridAttention(TeacherAttention):
    """A hybrid layer; the module's docstring has its equations.

    Parameters beside the teacher's: salience (D,) and key_offset (K, P), which get no gradient; mass (H', 2 + F' + F);
    down (rank, 3 H' P) and up (D, rank). H' counts the query heads that are not kept.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.shape = BlockShape.of(config, layer_idx)
        kv_heads = config.num_key_value_heads
        self.shared = self.num_key_value_groups
        self.kept = sorted({head // self.shared for head in config.full_heads_of(layer_idx)})
        self.windowed = [head for head in range(kv_heads) if head not in self.kept]
        self.kept_roundings = Rounding.of_pair(config.full_attention_bits, self.head_dim, config.mixer_backend)
        self.key_offset = self.key_offset_of(self.shape.key_rounding.rounds or self.kept_roundings[0].rounds)
        # no buffer, since accelerate leaves buffers out where it offloads weights to a disk
        salience = torch.zeros(config.hidden_size) if config.hybrid_salient else None
        self.register_parameter("salience", None if salience is None else nn.Parameter(salience, requires_grad=False))
        self.mass = self.down = self.up = None
        if self.shape.slow is not None:
            self.mass = nn.Parameter(theory_mass(config, layer_idx))
            rank = config.rank_of(layer_idx)
            features = 3 * len(self.windowed) * self.shared * self.head_dim
            if rank:
                self.down = nn.Linear(features, rank, bias=False)
                self.up = nn.Linear(rank, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        inputs: HybridInputs | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, L, D) -> (B, L, D).

        Args:
            inputs: without them, rows begin here and hold no padding.
            kwargs: of transformers' attention function, for kept heads.
        """
        if inputs is None:
            inputs = unpadded(hidden_states)
        layer = None if cache is None else cache.layers[self.layer_idx]
        projected = self.project(hidden_states, position_embeddings, inputs)
        of_kept = self.attend_kept(projected, inputs.causal_mask, layer, **kwargs) if self.kept else None
        projected = self.select_windowed(projected)
        if layer is not None and not torch.is_grad_enabled() and self._is_step(hidden_states.shape[1], inputs):
            output, features = self.step(projected, inputs, layer)
        else:
            output, features = self.prompt(projected, inputs, layer)
        return self.project_out(*self.gated(hidden_states, output, of_kept, features))

    def project(self, hidden_states: torch.Tensor, position_embeddings: Rotary, inputs: HybridInputs) -> Projected:
        """Queries, keys and values of hidden states (B, L, D)."""
        query, key, value = self.project_heads(hidden_states)
        sink_query = None
        if inputs.sink_rotary is not None and self.shape.sinks:
            sink_query = rotate_queries(query, inputs.sink_rotary)
        query, key = rotate_queries(query, position_embeddings), self.rotated_keys(key, position_embeddings)
        return Projected(query, sink_query, key, value, self._salience_of(hidden_states, inputs))

    def _salience_of(self, hidden_states: torch.Tensor, inputs: HybridInputs) -> torch.Tensor:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        if self.salience is None:
            salience = torch.full(inputs.index.shape, -torch.inf, dtype=wide, device=hidden_states.device)
        else:
            salience = (hidden_states.detach().to(wide) * self.salience.detach().to(wide)).sum(-1)
        if inputs.start is not None and inputs.start >= self.shape.sinks:
            return salience
        salience = salience.masked_fill(inputs.index < self.shape.sinks, torch.inf)
        if inputs.start is None:
            salience = salience.masked_fill(inputs.index < 0, -torch.inf)
        return salience

    def attend_kept(self, projected: Projected, causal_mask, layer, **kwargs) -> torch.Tensor:
        """Full attention of the kept heads, (B, L, heads, P)."""
        query, key, value = self.select_kept(projected)
        if causal_mask is None and self.config._attn_implementation in (None, "eager"):  # outside of any model
            causal_mask = causal_bias(projected.query)[None, None]
        store = None if layer is None else functools.partial(append_keys, layer.kept)
        return attend_rounded(
            self,
            self.kept_roundings,
            store,
            query,
            key,
            value,
            attention_mask=causal_mask,
            dropout=self.dropout,
            scaling=self.scaling,
            softcap=self.softcap,
            sinks=self.sinks_of(self.kept),
            **kwargs,
        )[0]

    def select_kept(self, projected: Projected) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the kept heads."""
        query = _of_heads(projected.query, self.kept, self.shared)
        return query, _of_heads(projected.key, self.kept), _of_heads(projected.value, self.kept)

    def select_windowed(self, projected: Projected) -> Projected:
        """Projections of the heads with a window, and the rows of their keys and values that a cache takes."""
        query, sink_query, key, value, salience = projected[:5]
        if self.kept:
            query = _of_heads(query, self.windowed, self.shared)
            if sink_query is not None:
                sink_query = _of_heads(sink_query, self.windowed, self.shared)
            key, value = (_of_heads(t, self.windowed) for t in (key, value))
        return Projected(query, sink_query, key, value, salience, *self.rows_of(key, value))

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, K, L, P) of heads with a window as a cache holds them."""
        of_keys, of_values = self.shape.key_rounding, self.shape.value_rounding
        if of_keys == of_values and of_keys.rounds and key.shape[2] == 1:
            return of_keys.encode(torch.stack([key, value])).unbind()  # of one token, calls cost most
        return of_keys.encode(key), of_values.encode(value)

    def rounded(self, projected: Projected) -> Projected:
        """Projections whose keys and values are rounded as a cache holds them; gradients pass unchanged."""
        key = self.shape.key_rounding.round(projected.key, projected.key_rows)
        value = self.shape.value_rounding.round(projected.value, projected.value_rows)
        return projected._replace(key=key, value=value)

    def gated(
        self,
        hidden_states: torch.Tensor,
        output: torch.Tensor,
        of_kept: torch.Tensor | None,
        features: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The arguments of `project_out` times the teacher's gates; themselves where it has none.

        Args:
            hidden_states: (B, L, D), the layer's input at the tokens of `output`.
        """
        if self.gate_proj is None:
            return output, of_kept, features
        gates = self.head_gates(hidden_states).transpose(1, 2)
        of_windowed = _of_heads(gates, self.windowed, self.shared).transpose(1, 2)
        if of_kept is not None:
            of_kept = of_kept * _of_heads(gates, self.kept, self.shared).transpose(1, 2)
        if features is not None:  # three vectors of every head
            features = features * of_windowed[:, -features.shape[1] :].repeat(1, 1, 1, 3).flatten(2)
        return output * of_windowed, of_kept, features

    def project_out(
        self, output: torch.Tensor, of_kept: torch.Tensor | None, features: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, L, D) of the heads' outputs (B, L, H', P) and the features (B, L, 3 H' P), or the last of them."""
        if of_kept is not None:
            both = torch.cat([output, of_kept.to(output.dtype)], dim=2).unflatten(2, (-1, self.shared))
            order = [*self.windowed, *self.kept]
            output = torch.cat([both[:, :, place : place + 1] for place in map(order.index, sorted(order))], dim=2)
        mixed = self.o_proj(output.flatten(2))
        if features is None or self.down is None:
            return mixed
        change = self.up(self.down(features))
        if change.shape[1] < mixed.shape[1]:
            change = F.pad(change, (0, 0, mixed.shape[1] - change.shape[1], 0))
        return mixed + change

    # A prompt

    def prompt(self, projected: Projected, inputs: HybridInputs, layer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The heads' outputs (B, L, H', P) and the features (B, L', 3 H' P) of the last L' tokens, None for L' = 0.

        Long prompts are gone through a segment at a time.

        Args:
            layer: of the cache, to go on from and to update; or None.
        """
        held = None if layer is None else layer.held
        projected = self.rounded(projected)
        length = projected.query.shape[2]
        outputs = []
        features = []
        size = SEGMENT
        if inputs.seq_idx is not None:
            size = length
        elif self._in_kernels(projected, inputs):
            size = KERNEL_SEGMENT
        # a compiled graph is for a number of segments; range(0, length, size) would make it one for this length
        for first in [n * size for n in range(-(-length // size))]:
            part, of_part = _segment(projected, inputs, slice(first, first + size), whole=size >= length)
            keeps = layer is not None or first + size < length
            opened = self._opened(held, part, of_part)
            fused = is_torchdynamo_compiling() or self._by_flex(part.query)
            if torch.is_grad_enabled() and not fused:
                # else scores and probabilities are kept for the backward pass, as much as the rest of the model's
                mixed = checkpoint(self.mix, part, of_part, opened, keeps, use_reentrant=False)
            else:
                mixed = self.mix(part, of_part, opened, keeps)
            output, of_features, after = mixed
            outputs.append(output)
            if of_features is not None:
                features.append(of_features)
            if after is not None:
                held = after
            elif keeps:
                tokens = part.tokens(of_part.index)
                held = advance(Held.empty(self.shape, tokens) if held is None else held, tokens, self.shape)
        if layer is not None:
            layer.keep(held, projected.tokens(inputs.index))
        return _joined(outputs), _joined(features)

    def _opened(self, held: Held | None, projected: Projected, inputs: HybridInputs) -> Held | None:
        """State of the layer while the block of the first token is open; None in rows that are known to begin here."""
        if held is None:
            if inputs.start == 0 or inputs.seq_idx is not None:
                return None
            return Held.empty(self.shape, projected.tokens(inputs.index))
        if inputs.start is None:
            return open_blocks(held, self.shape, held.seen)
        if inputs.start % self.shape.block == 0 and inputs.start >= self.shape.window:
            return open_block(held, self.shape)
        return held

    def mix(
        self, projected: Projected, inputs: HybridInputs, held: Held | None, keeps: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, Held | None]:
        """`prompt` for one segment, in whose rows the block of the first token is open already.

        Returns:
            The outputs, the features, and what is held afterwards: if it `keeps` that and rows are alike, else None.
        """
        shape = self.shape
        length = projected.query.shape[2]
        tokens = projected.tokens(inputs.index) if keeps else None
        causal = shape.window if held is None and inputs.start == 0 else 0  # tokens that attend to all before them
        begin = None
        if causal:
            begin = self._attend_causally(
                *(t[:, :, :causal] for t in (projected.query, projected.key, projected.value))
            )
            if length <= causal:
                return begin, None, None if tokens is None else Held.within_window(shape, tokens)
        if not inputs.end_alike:
            tokens = None
        if self._in_kernels(projected, inputs):
            with on_device_of(projected.query):
                return self._mix_in_kernels(projected, inputs, held, begin, tokens)
        if begin is not None:
            layout = Layout.behind_window(shape, projected.key)
        elif inputs.seq_idx is not None:
            layout = Layout.packed(shape, inputs.index, inputs.seq_idx)
            tokens = None
        elif inputs.start is None:
            layout = Layout.gathered(shape, held, inputs.index)
            tokens = None
        else:
            layout = Layout.continued(shape, held, projected.key, inputs.start)
        query = projected.query
        in_c = self.mass is not None and not torch.is_grad_enabled() and layout.runs_in_c(query, query.dtype)
        near = self.attend_blocks(projected, held, layout, tokens, sums=not in_c)
        if in_c:
            return self._mix_in_c(near, held, begin, layout)
        output, features = near.output, None
        if near.state is not None:
            output, features = self.read(near.query, near.output, near.log_mass, self.readout(near.state))
            features = layout.to_tokens(layout.in_order(features).flatten(2))
        output = layout.to_tokens(layout.in_order(output))
        if begin is not None:
            output = torch.cat([begin, output], dim=1)
        return output, features, near.after

    def _mix_in_c(
        self, near: Near, held: Held | None, begin: torch.Tensor | None, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor | None, Held | None]:
        """`mix` once softmax attention is known, with outputs `begin` of tokens before the blocks of the layout."""
        sizes = layout.sizes
        offset, tokens = sizes.offset, sizes.new_tokens
        if layout.slot is not None:  # tokens are gathered from all slots
            offset, tokens = 0, sizes.mixed * self.shape.block
        output, features, state = mix_blocks_on_cpu(
            near.query, near.output, near.log_mass, near.keys, near.values, near.until,
            None if held is None else held.state, begin, self.mass, self.scaling, *self.shape.slow, sizes.first,
            offset, tokens, sizes.last - sizes.first, self.down is not None,
        )  # fmt: skip
        if layout.slot is not None:
            output = layout.to_tokens(output)
            features = None if features is None else layout.to_tokens(features)
        after = None if near.after is None else near.after._replace(state=state)
        return output, features, after

    def attend_blocks(
        self,
        projected: Projected,
        held: Held | None,
        layout: Layout,
        tokens: NewTokens | None = None,
        sums: bool = True,
    ) -> Near:
        """Softmax attention of the blocks of a layout, the state beside it, and what is held after `tokens`.

        Args:
            sums: False if the state is left out.
        """
        past_keys = past_values = past_salience = None
        if held is not None:
            past_keys, past_values = decoded(self.shape, *held[:2], projected.key.dtype)
            past_salience = held.salience
        keys, values = layout.columns(past_keys, projected.key), layout.columns(past_values, projected.value)
        salience = layout.salience(past_salience, projected.salience)
        holders, until = layout.select(salience)
        query = layout.queries(projected.query, self.kv_groups)
        visible = until
        sinks = None
        if projected.sink_query is not None:
            visible = layout.without_sinks(until, salience)
            sink_query = layout.queries(projected.sink_query, self.kv_groups)
            sinks = self._attend_sinks(sink_query, keys, values, salience, holders, layout)
            sinks = self.beside_offset(sinks, query, sink_query, heads_axis=2)
        if self._by_flex(projected.query):
            output, log_mass = self._attend_by_flex(query, keys, values, visible, layout)
        else:
            output, log_mass = self._attend_groups(query, keys, values, holders, visible, layout)
        if sinks is not None:
            output, log_mass = merged((output, log_mass), sinks)
        output, log_mass = self.beside_learned_sinks((output, log_mass), heads_axis=2)
        state = final = after = None
        open_last = layout.sizes.last - layout.sizes.first
        if self.mass is not None and sums:
            of_blocks = layout.states(held, keys, values, holders)
            state = State(*(layout.by_group(t) for t in State.of(of_blocks)))
            if tokens is not None:  # a part would keep the whole in memory
                final = of_blocks[:, open_last].clone(memory_format=torch.contiguous_format)
        if tokens is not None:
            after = layout.sizes.held_after(held, tokens, salience, holders[:, open_last], final)
        return Near(query, output, log_mass, keys, values, state, until, after)

    @property
    def kv_groups(self) -> tuple[int, int]:
        """Key/value heads with a window, and query heads of each."""
        return len(self.windowed), self.shared

    def read(
        self, query: torch.Tensor, output: torch.Tensor, log_mass: torch.Tensor, readout: Readout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix what the state returns into the outputs of softmax attention.

        Args:
            query, output: (B, K, R, Q, P), or (B, J, K, M/J, R, Q, P). log_mass: without P, Z. readout: of states
                (B, K, .), or (B, J, K, M/J, .).

        Returns:
            The outputs, and the features (..., 3 P) of the low-rank map.
        """
        shape = query.shape
        dtype = output.dtype
        query = query.to(readout.linear.dtype)
        linear = torch.addcmul(readout.linear, query, readout.quadratic)
        mass = (linear * query).sum(-1) + readout.constant
        gate = torch.sigmoid(mass - log_mass)[..., None]
        far = torch.baddbmm(
            readout.value_mean.reshape(-1, 1, shape[-1]),
            query.reshape(-1, shape[-3] * shape[-2], shape[-1]),
            readout.covariance.reshape(-1, shape[-1], shape[-1]),
        ).view(shape)
        far, gate = far.to(dtype), gate.to(dtype)
        mean = readout.value_mean.to(dtype).expand(shape)
        return torch.lerp(output, far, gate), gate * torch.cat([output, mean, far], dim=-1)

    def readout(self, state: State) -> Readout:
        """The readout of a state (..., K, .)."""
        slow = self.shape.slow
        K, R = self.kv_groups
        c0, c1, alpha, beta = self.mass_of_heads(state.key_mean.dtype)
        middle = (1,) * (state.log_count.ndim > 2)  # blocks of a group, between the heads and what is of each head
        c0, c1 = (t.view(K, *middle, R, 1) for t in (c0, c1))
        constant = c0 + c1 * state.log_count[..., None, None]
        constant = constant.masked_fill(state.empty[..., None, None], -torch.inf)
        linear = state.key_mean[..., None, None, :] * (alpha * self.scaling).view(K, *middle, R, 1, -1)
        covariance = slow.put(state.covariance * self.scaling).mT
        quadratic = (beta * self.scaling**2).view(K, *middle, R, 1, -1)
        return Readout(constant, slow.put(linear), quadratic, state.value_mean[..., None, None, :], covariance)

    def mass_of_heads(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """c0 and c1 (H',), alpha (H', N) and beta (H', P): one number for both dimensions of a plane."""
        slow = self.shape.slow
        parts = self.head_dim - slow.planes
        slow_parts = self.mass.shape[1] - 2 - parts
        c0, c1, alpha, beta = self.mass.to(dtype).split([1, 1, slow_parts, parts], dim=1)
        alpha = torch.cat([alpha[:, : slow.slow_planes], alpha], dim=1)
        beta = torch.cat([beta[:, : slow.planes], beta], dim=1)
        return c0[:, 0], c1[:, 0], alpha, beta

    def mass_features(self, query: torch.Tensor, state: State) -> torch.Tensor:
        """[1, log m, (q' . mean k')_f, (q . q)_f] of queries (B, J, K, M/J, R, Q, P), the factors of `mass`."""
        query = query.to(state.key_mean.dtype) * self.scaling
        slow = self.shape.slow
        products = (
            (slow.take(query) * state.key_mean[..., None, None, :], slow.slow_planes),
            (query.square(), slow.planes),
        )
        by_plane = [t[..., half:] + F.pad(t[..., :half], (0, t.shape[-1] - 2 * half)) for t, half in products]
        log_count = state.log_count[..., None, None, None].expand(*query.shape[:-1], 1)
        return torch.cat([torch.ones_like(log_count), log_count, *by_plane], dim=-1)

    # Softmax attention

    def _attend_causally(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(B, L, H', P) of rows that begin here."""
        if self.softcap is None and self.sinks is None:
            output = F.scaled_dot_product_attention(
                query, key, value, dropout_p=self.dropout, is_causal=True, scale=self.scaling,
                enable_gqa=self.shared > 1,
            )  # fmt: skip
            return output.transpose(1, 2)
        bias = causal_bias(query).repeat(self.shared, 1)[None, None]
        by_head = (self.shared, query.shape[2])
        near = self._attend(query.unflatten(1, self.kv_groups).flatten(2, 3), key, value, bias)
        output, log_mass = (t.unflatten(2, by_head) for t in near)
        return self.beside_learned_sinks((output, log_mass), heads_axis=1)[0].flatten(1, 2).transpose(1, 2)

    def _attend_groups(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, holders, until, layout: "Layout"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries (B, J, K, M/J, R, E, P) to salient cache and window: the same shape, and Z."""
        keys, values = (layout.columns_of_groups(t, holders) for t in (keys, values))
        bias = layout.bias(holders, until, query.dtype, self.shared)
        shape = query.shape
        query = query.flatten(3, 5)
        output, log_mass = self._attend(query, keys, values, bias[:, :, None])
        return output.view(shape), log_mass.view(shape[:-1])

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention (..., Q, P) with its log-sum-exp (..., Q), for queries (..., Q, P), keys and values
        (..., T, P), and a bias (..., Q, T), which is the least number where nothing is attended to."""
        if fuses_on_cpu(query, keys, values) and self.softcap is None and not self.training:
            lead = query.shape[:-3]
            shape = query.shape
            query, keys = (t.to(values.dtype) for t in (query, keys))  # autocast leaves them unlike
            if bias is not None:
                bias = bias.to(values.dtype)
            if len(lead) != 1:
                query, keys, values = (t.expand(*lead, *t.shape[-3:]).flatten(0, -4) for t in (query, keys, values))
                if bias is not None:
                    bias = bias.expand(*lead, *bias.shape[-3:]).flatten(0, -4)
            output, log_mass = FUSED_ON_CPU(query, keys, values, attn_mask=bias, scale=self.scaling)
            if len(lead) == 1:  # one token saves the calls of views that would change nothing
                return output, log_mass
            return output.view(shape), log_mass.view(shape[:-1])
        scores = (query @ keys.mT).to(torch.promote_types(query.dtype, torch.float32)) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        log_mass = scores.logsumexp(-1)
        probabilities = (scores - log_mass[..., None]).exp().to(values.dtype)
        probabilities = F.dropout(probabilities, self.config.attention_dropout, self.training)
        return probabilities @ values, log_mass

    def sinks_of(self, kv_heads: list[int]) -> torch.Tensor | None:
        """The learned sinks of the query heads of some key/value heads, (heads,); None where the teacher has none."""
        return None if self.sinks is None else _of_heads(self.sinks[None], kv_heads, self.shared)[0]

    def beside_learned_sinks(
        self, near: tuple[torch.Tensor, torch.Tensor], heads_axis: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the heads with a window, outputs (..., P) and log-sum-exps Z (...), to a sink of each too:
        a learned score without a value.

        Args:
            heads_axis: axis of the key/value heads; that of the query heads of each is the last but one of Z.
        """
        if self.sinks is None:
            return near
        output, log_mass = near
        sinks = self.sinks_of(self.windowed).view(self.kv_groups)
        shape = [1] * log_mass.ndim
        shape[heads_axis], shape[-2] = sinks.shape
        with_sinks = torch.logaddexp(log_mass, sinks.view(shape).to(log_mass.dtype))
        return output * (log_mass - with_sinks).exp()[..., None].to(output.dtype), with_sinks

    def _attend_sinks(self, query, keys, values, salience, holders, layout: "Layout"):
        """Attention of queries (B, J, K, M/J, R, E, P), rotated for it, to the sinks that have left the window."""
        holders = holders[..., : self.shape.sinks].unflatten(1, (-1, layout.group))  # (B, J, M/J, S)
        absent = salience.gather(1, holders.clamp(min=0).flatten(1)).view(holders.shape) < torch.inf
        absent = absent | (holders < 0)
        keys, values = (gather_columns(t, holders.clamp(min=0)).permute(0, 2, 1, 3, 4, 5) for t in (keys, values))
        bias = hiding(absent, query.dtype)
        shape = query.shape
        output, log_mass = self._attend(query.flatten(4, 5), keys, values, bias[:, :, None, :, None])
        return output.view(shape), log_mass.view(shape[:-1])

    def _by_flex(self, query: torch.Tensor) -> bool:
        return not self.dropout and can_flex(query, self.config.mixer_backend)

    def _attend_by_flex(self, query, keys, values, until, layout: "Layout"):
        """`_attend_groups` by one kernel of flex_attention."""
        flat = layout.in_order(query).transpose(1, 2)  # (B, H', slots, P)
        seen_from = layout.block_of_query(), layout.column_of_query(), until, layout.sequence
        output, log_mass = attend_by_flex(flat, keys, values, *seen_from, self.scaling, self.softcap)
        parts = (output.transpose(1, 2), log_mass.transpose(1, 2)[..., None])
        output, log_mass = (layout.in_groups(t, self.kv_groups) for t in parts)
        return output, log_mass[..., 0]

    # Kernels for a prompt

    def _in_kernels(self, projected: Projected, inputs: HybridInputs) -> bool:
        """True where Triton kernels do what surrounds flex_attention: on CUDA, without a gradient, rows alike."""
        if torch.is_grad_enabled() or is_torchdynamo_compiling() or inputs.start is None or inputs.seq_idx is not None:
            return False
        if self.mass is None or self.sinks is not None or projected.sink_query is not None or self.dropout:
            return False
        query = projected.query
        if requested_backend(self.config.mixer_backend) == "torch" or not can_run(query.is_cuda, query.dtype):
            return False
        return fits(self.shape, query.shape[-1])

    def _mix_in_kernels(
        self,
        projected: Projected,
        inputs: HybridInputs,
        held: Held | None,
        begin: torch.Tensor | None,
        tokens: NewTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Held | None]:
        """`mix` once the first tokens, with outputs `begin`, have attended causally."""
        shape = self.shape
        batch, heads, length, P = projected.query.shape
        past_keys = past_values = past_salience = state = None
        if begin is not None:
            blocks = Blocks.behind_window(shape, length)
        else:
            blocks = Blocks.continued(shape, length, inputs.start)
            past_keys, past_values = decoded(shape, *held[:2], projected.key.dtype)
            past_salience = held.salience
            state = held.state
        keys, values = blocks.in_columns(past_keys, projected.key), blocks.in_columns(past_values, projected.value)
        salience = blocks.salience(past_salience, projected.salience)
        lost = lose_columns(salience, blocks)
        query = in_tiles(projected.query, blocks)
        slots = numbered_slots(query.shape[2], blocks.first, shape.block, blocks.first_column, query.device)
        tiles = visible_tiles(lost.until, query.shape[2], blocks)
        near = attend_by_flex(query, keys, values, *slots, lost.until, None, self.scaling, self.softcap, tiles)
        output = projected.value.new_empty(batch, length, heads, P)
        if begin is not None:
            output[:, : begin.shape[1]] = begin
        features, state = mix_blocks(
            projected.query, *near, keys, values, lost, state, self.mass, self.scaling, blocks, output,
            self.down is not None,
        )  # fmt: skip
        if tokens is None:
            return output, features, None
        return output, features, hold(held, tokens, salience, last_places(salience, lost, blocks), state, blocks)

    # A step

    def step(self, projected: Projected, inputs: HybridInputs, layer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do what `prompt` does for L tokens of one block, which are written into the cache's layer in place."""
        shape = self.shape
        query = projected.query
        start = inputs.start
        tokens = projected.tokens(inputs.index)
        is_early = start is not None and start < shape.window  # the state is empty then
        kernel = self._kernel_for_step(query)
        if kernel is not None:
            if kernel is mix_one and start is None and fits(shape, query.shape[-1], least=1):
                layer.put_one(tokens)
            else:
                layer.put(tokens, start)
            offset = None if projected.sink_query is None else self.windowed_offset
            output, features = kernel(
                *layer.held, query, projected.sink_query, offset, self.mass, self.scaling,
                self.softcap or 0.0, shape.block, shape.sinks, shape.places, *shape.slow,
            )  # fmt: skip
            if is_early:
                return output, None
            return output, features
        first, last, hidden = layer.write(tokens, start)
        held = layer.held
        by_head = query.unflatten(1, self.kv_groups)  # (B, K, R, L, P)
        query = by_head.flatten(2, 3)
        bias = None
        if hidden is not None:
            bias = hiding(hidden, query.dtype).repeat(1, self.shared, 1)[:, None]
        # queries and outputs are rotated as the rounding rotates keys and values, since the cache is much larger
        turn = shape.key_rounding.rotate
        rows = (t[:, :, first:last] for t in held[:2])
        keys, values = decoded(shape, *rows, query.dtype, rotated=True)
        if projected.sink_query is not None and not is_early:
            output, log_mass = self._attend_far_sinks(query, projected.sink_query, keys, values, held, bias)
        else:
            output, log_mass = self._attend(turn(query), keys, values, bias)
        output = shape.value_rounding.rotate(output)
        output, log_mass = output.view(by_head.shape), log_mass.view(by_head.shape[:-1])
        output, log_mass = self.beside_learned_sinks((output, log_mass), heads_axis=1)
        features = None
        if self.mass is not None and not is_early:
            if layer.readout is None or is_torchdynamo_compiling():
                layer.readout = self.readout(State.of(held.state))
            output, features = self.read(by_head, output, log_mass, layer.readout)
            features = features.flatten(1, 2).transpose(1, 2).flatten(2)
        return output.flatten(1, 2).transpose(1, 2), features

    def _is_step(self, length: int, inputs: HybridInputs) -> bool:
        """Return True if the tokens of a pass lie in one block, so that only they are written."""
        if length == 1:
            return True
        return inputs.start is not None and inputs.start % self.shape.block + length <= self.shape.block

    def _kernel_for_step(self, query: torch.Tensor) -> Callable | None:
        """The kernel that computes the step, of Triton on CUDA and of C on a CPU; None where neither does, or the
        backend "torch" is asked for."""
        if self.mass is None or self.sinks is not None or self.dropout or query.shape[2] > 1:
            return None
        bits = self.shape.key_rounding.bits, self.shape.value_rounding.bits
        if can_run(query.is_cuda, query.dtype) and requested_backend(self.config.mixer_backend) != "torch":
            return mix_one if {*bits} <= {8, WHOLE} else None
        if can_run_on_cpu(query.device, query.dtype, self.config.mixer_backend):
            return functools.partial(mix_one_on_cpu, key_bits=bits[0], value_bits=bits[1])
        return None

    def _attend_far_sinks(self, query, sink_query, keys, values, held: Held, bias):
        """`_attend` to keys and values as they are stored, where the sinks, in the first places, are attended to by a
        query of their own."""
        sinks = self.shape.sinks
        sink_query = sink_query.unflatten(1, self.kv_groups).flatten(2, 3)
        queries = query, sink_query
        query, sink_query = (self.shape.key_rounding.rotate(t) for t in queries)
        if bias is None:  # all places are held, the first by sinks
            near = self._attend(query, keys[:, :, sinks:], values[:, :, sinks:], None)
            far = self._attend(sink_query, keys[:, :, :sinks], values[:, :, :sinks], None)
            return merged(near, self.beside_offset(far, *queries, heads_axis=1))
        is_sink = (held.salience[:, :sinks] == torch.inf)[:, None, None]
        others = bias.expand(len(keys), -1, -1, -1).clone()
        others[..., :sinks] = others[..., :sinks].masked_fill(is_sink, torch.finfo(query.dtype).min)
        near = self._attend(query, keys, values, others)
        far = self._attend(sink_query, keys[:, :, :sinks], values[:, :, :sinks], hiding(~is_sink, query.dtype))
        return merged(near, self.beside_offset(far, *queries, heads_axis=1))

    @property
    def windowed_offset(self) -> torch.Tensor | None:
        """Offset (K, P) of the keys of heads with a window; None where there is none."""
        if self.key_offset is None:
            return None
        return _of_heads(self.key_offset.detach()[None], self.windowed)[0]

    def beside_offset(
        self, far: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, sink_query: torch.Tensor, heads_axis: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to sinks by a query of their own, as it counts beside that to all others.

        The scores of these lack the query's product with the offset, and those of sinks the sink query's.

        Args:
            far: output and log-sum-exp. query, sink_query: (..., P), key/value heads in `heads_axis`.
        """
        offset = self.windowed_offset
        if offset is None:
            return far
        output, log_mass = far
        offset = offset.view(len(offset), *[1] * (query.ndim - heads_axis - 2), -1).to(log_mass.dtype)
        moved = sink_query.to(log_mass.dtype) - query.to(log_mass.dtype)
        return output, log_mass + (moved * offset).sum(-1) * self.scaling


def causal_bias(query: torch.Tensor) -> torch.Tensor:
    """(L, L) for queries (B, H, L, P): 0 where one attends, else the least number of their type."""
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).triu(1)
    return hiding(later, query.dtype)


def merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of columns together, from that to either: outputs (..., P) and log-sum-exps (...)."""
    log_mass = torch.logaddexp(one[1], other[1])
    parts = (output * (mass - log_mass).exp()[..., None].to(output.dtype) for output, mass in (one, other))
    return sum(parts), log_mass


def _of_heads(t: torch.Tensor, kv_heads: list[int], shared: int = 1) -> torch.Tensor:
    """The heads of some key/value heads, `shared` each, of (B, heads, L, P); cut, as an index would have to be sent to
    the device."""
    return _joined([t[:, shared * first : shared * last] for first, last in runs(kv_heads)])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of parts that follow one another along the second dimension; None for no parts."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1)


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as ranges: [3, 4, 5, 1] is [(3, 6), (1, 2)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def _segment(projected: Projected, inputs: HybridInputs, which: slice, whole: bool) -> tuple[Projected, HybridInputs]:
    """Consecutive tokens of a prompt, read at once."""
    if whole:
        return projected, inputs
    tensors = [None if t is None else t[:, :, which] for t in projected._replace(salience=None)]
    start = None if inputs.start is None else inputs.start + which.start
    part = Projected(*tensors)._replace(salience=projected.salience[:, which])
    return part, HybridInputs(inputs.index[:, which], start, end_alike=inputs.end_alike)
