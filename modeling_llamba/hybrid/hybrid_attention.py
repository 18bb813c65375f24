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

A step writes one column and does 4 to 6 for one query; a block is opened every E steps. The ground truth is naive.py.

The layer projects, and a backend computes what lies between (kernels/backend.py): prompt.py and step.py are PyTorch's
operations, near.py their softmax attention and readout.py their states. On a GPU Triton kernels around flex_attention
do 3 to 6, and rotate queries and keys; on a CPU functions in C do 3, 5 and 6.

Shapes: B batch, L length, D model width, H heads, H' heads with a window, K key/value heads, R heads per key/value
head, P head dim, N state, F planes and other dims, F' slow planes and other slow dims, E block, n whole blocks, S
places, T columns, M mixed blocks, J groups of blocks, Q queries.
"""

import functools
from operator import itemgetter

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..kernels.backend import backend_for
from ..kernels.softmax import causal_bias
from ..model.attention import TeacherAttention, append_keys, attend_rounded
from ..model.rotary import Rotary, rotate_queries
from .eviction import BlockShape
from .inputs import HybridInputs, Projected, Ranked, WindowedHeads, of_heads, runs, unpadded
from .prompt import read_prompt
from .readout import theory_mass
from .rounding import Rounding


class HybridAttention(TeacherAttention):
    """A hybrid layer; the module's docstring has its equations.

    Parameters beside the teacher's: salience (D,) and key_offset (K', P) without a gradient; mass (H', 2 + F' + F);
    down (rank, 3 H' P) and up (D, rank). H' counts query heads with a window, K' key/value heads that are kept.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.shape = BlockShape.of(config, layer_idx)
        kv_heads = config.num_key_value_heads
        self.shared = self.num_key_value_groups
        self.kept = sorted({head // self.shared for head in config.full_heads_of(layer_idx)})
        self.windowed = [head for head in range(kv_heads) if head not in self.kept]
        self.kept_roundings = Rounding.of_pair(config.full_attention_bits, self.head_dim, config.backend)
        self.key_offset = self.make_key_offset(len(self.kept), self.kept_roundings[0])
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

    @torch.no_grad()
    def initialise(self) -> None:
        """Let the state have the mass that theory gives it, and no map."""
        super().initialise()
        if self.mass is not None:
            init.copy_(self.mass, theory_mass(self.config, self.layer_idx).to(self.mass))
        if self.up is not None:
            init.zeros_(self.up.weight)
        if self.salience is not None:
            init.zeros_(self.salience)

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
        output, features = self.attend(self.select_windowed(projected), inputs, layer)
        return self.project_out(*self.gated(hidden_states, output, of_kept, features))

    def project(self, hidden_states: torch.Tensor, position_embeddings: Rotary, inputs: HybridInputs) -> Projected:
        """Queries, keys and values of hidden states (B, L, D)."""
        query, key, value = self.project_heads(hidden_states)
        sink_query = None
        if inputs.sink_rotary is not None and self.shape.sinks:
            sink_query = rotate_queries(query, inputs.sink_rotary)
        backend = backend_for(query, self.config.backend)
        ranked = Ranked(hidden_states, self.salience, inputs, self.shape.sinks)
        query, key, salience = backend.rotate_and_rank(query, key, position_embeddings, ranked)
        return Projected(query, sink_query, key, value, salience)

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

    def attend(self, projected: Projected, inputs: HybridInputs, layer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs (B, L, H', P) of the heads with a window, and the features (B, L', 3 H' P) of the last L' tokens.

        Args:
            layer: of the cache, to go on from and to update; or None.
        """
        backend = backend_for(projected.query, self.config.backend)
        heads = self.heads()
        # a step writes into the cache in place, through which no gradient would pass
        if layer is not None and not torch.is_grad_enabled() and self._is_step(projected.query.shape[2], inputs):
            return backend.step(heads, projected, inputs, layer)
        return read_prompt(backend, heads, projected, inputs, layer)

    def _is_step(self, length: int, inputs: HybridInputs) -> bool:
        """Return True if the tokens of a pass, without padding, lie in one block, so that only they are written."""
        if length == 1:
            return True
        if inputs.start is None or not inputs.end_alike:
            return False
        return inputs.start % self.shape.block + length <= self.shape.block

    def heads(self) -> WindowedHeads:
        """The heads with a window, as a backend computes them."""
        return WindowedHeads(
            self.shape,
            len(self.windowed),
            self.shared,
            self.scaling,
            self.softcap,
            self.sinks_of(self.windowed),
            self.mass,
            self.down is not None,
            self.dropout,
        )

    def sinks_of(self, kv_heads: list[int]) -> torch.Tensor | None:
        """The learned sinks of the query heads of some key/value heads, (heads,); None where the teacher has none."""
        return None if self.sinks is None else of_heads(self.sinks[None], kv_heads, self.shared)[0]

    def select_kept(self, projected: Projected) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys less their offset, and values of the kept heads."""
        query = of_heads(projected.query, self.kept, self.shared)
        key = self.less_offset(of_heads(projected.key, self.kept))
        return query, key, of_heads(projected.value, self.kept)

    def select_windowed(self, projected: Projected) -> Projected:
        """Projections of the heads with a window, and the rows of their keys and values that a cache takes."""
        query, sink_query, key, value, salience = projected[:5]
        if self.kept:
            query = of_heads(query, self.windowed, self.shared)
            if sink_query is not None:
                sink_query = of_heads(sink_query, self.windowed, self.shared)
            key, value = (of_heads(t, self.windowed) for t in (key, value))
        return Projected(query, sink_query, key, value, salience, *self.rows_of(key, value))

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, K, L, P) of heads with a window as a cache holds them."""
        roundings = self.shape.key_rounding, self.shape.value_rounding
        return backend_for(key, self.config.backend).encode_pair(key, value, roundings)

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
        of_windowed = of_heads(gates, self.windowed, self.shared).transpose(1, 2)
        if of_kept is not None:
            of_kept = of_kept * of_heads(gates, self.kept, self.shared).transpose(1, 2)
        if features is not None:  # three vectors of every head
            features = features * of_windowed[:, -features.shape[1] :].repeat(1, 1, 1, 3).flatten(2)
        return output * of_windowed, of_kept, features

    def project_out(
        self, output: torch.Tensor, of_kept: torch.Tensor | None, features: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, L, D) of the heads' outputs (B, L, H', P) and the features (B, L, 3 H' P), or the last of them."""
        if of_kept is not None:  # o_proj takes the heads in the teacher's order
            parts = []
            for of_some, kv_heads in ((output, self.windowed), (of_kept.to(output.dtype), self.kept)):
                together = runs(kv_heads)
                sizes = [(last - first) * self.shared for first, last in together]
                parts += zip(together, of_some.split(sizes, dim=2), strict=True)
            output = torch.cat([part for _, part in sorted(parts, key=itemgetter(0))], dim=2)
        mixed = self.o_proj(output.flatten(2))
        if features is None or self.down is None:
            return mixed
        change = self.up(self.down(features))
        if change.shape[1] < mixed.shape[1]:
            change = F.pad(change, (0, 0, mixed.shape[1] - change.shape[1], 0))
        return mixed + change
