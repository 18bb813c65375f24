"""PyTorch's operations of a hybrid: the reference that other backends override in part.

Shapes: B batch, L length, H heads, H' heads with a window, K key/value heads, R heads per key/value head, P head dim,
E block, S places, T columns, M mixed blocks, J groups of blocks, W bytes of a row, I inner width.
"""

import torch
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_torchdynamo_compiling

from ..hybrid.block_layout import Layout
from ..hybrid.eviction import BlockShape, Held, NewTokens, open_block, open_blocks
from ..hybrid.inputs import HybridInputs, Projected, Ranked, WindowedHeads
from ..hybrid.near import attend_causally, attend_of
from ..hybrid.prompt import Blocks, attend_blocks, layout_of, rounded, states_of
from ..hybrid.readout import read, readout
from ..hybrid.rounding import DECODED, Rounding, decode_rows, encode_rows
from ..hybrid.step import take_step
from ..model.rotary import Rotary, rotate_keys, rotate_queries
from .softmax import Near, attend

SEGMENT = 4096
"""Tokens of a prompt whose states and masks lie in memory at once."""
Mixed = tuple[torch.Tensor, torch.Tensor | None, Held | None]
"""The outputs (B, L, H', P), the features (B, L', 3 H' P) of the last L' tokens, and what is held afterwards."""


class TorchBackend:
    """All operations, on every device."""

    attends_to_pages = False
    """True where `attend_to_pages` attends to rows in pages (triton/triton_rows.py, c/c_functions.py)."""

    def computes(self, dtype: torch.dtype) -> bool:
        """Return True if the operations take numbers of this type."""
        return True

    def compiled(self, source) -> object | None:
        """The library of functions in C of a source file, a Path, compiled beside the backend's own; None where it has
        none."""
        return None

    # Tokens before attention

    def rotate(self, query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries (B, H, L, P) and keys (B, K, L, P)."""
        return rotate_queries(query, rotary), rotate_keys(key, rotary)

    def rotate_and_rank(
        self, query: torch.Tensor, key: torch.Tensor, rotary: Rotary, ranked: Ranked
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and the salience (B, L) of their tokens."""
        return *self.rotate(query, key, rotary), ranked.salience()

    # Rows of keys and values

    def encode(self, vectors: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        """Rows (..., W) uint8 of vectors (..., P)."""
        return encode_rows(vectors, rounding)

    def encode_pair(
        self, key: torch.Tensor, value: torch.Tensor, roundings: tuple[Rounding, Rounding]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of keys and of values (B, K, L, P), or these themselves where nothing is rounded."""
        of_keys, of_values = roundings
        if of_keys == of_values and of_keys.rounds and key.shape[2] == 1:
            return of_keys.encode(torch.stack([key, value])).unbind()  # of one token, calls cost most
        return of_keys.encode(key), of_values.encode(value)

    def decode(self, rows: torch.Tensor, rounding: Rounding, dtype: torch.dtype, rotated: bool) -> torch.Tensor:
        """Vectors (..., P) of rows (..., W); as they are stored, which is multiplied by the matrix, if `rotated`."""
        return decode_rows(rows, rounding, dtype, rotated)

    def attend_to_rows(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        roundings: tuple[Rounding, Rounding],
        bias: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Outputs (B, 1, H, P) of attention of one token's queries (B, H, 1, P), without a gradient.

        Args:
            keys, values: rows (B, K, T, W). bias: (B, T), to be added to the scores; None where none is hidden.
        """
        of_keys, of_values = roundings
        batch, kv_heads, columns = keys.shape[:3]
        # queries and outputs are rotated, since there is much more of what is held
        query = of_keys.rotate(query).unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, K, R, P)
        bias = None if bias is None else bias[:, None, None].to(query.dtype)
        at_once = max(DECODED // (batch * columns * of_keys.dim), 1)
        if is_torchdynamo_compiling():  # a graph would be one for a number of parts
            at_once = kv_heads
        outputs = []
        for first in range(0, kv_heads, at_once):
            part = slice(first, first + at_once)
            of_part = (
                rounding.decode(t[:, part], query.dtype, rotated=True)
                for rounding, t in zip(roundings, (keys, values), strict=True)
            )
            outputs.append(attend(query[:, part], *of_part, bias, scaling, softcap)[0])
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return of_values.rotate(output).flatten(1, 2)[:, None]

    # Blocks that open

    def open_blocks(self, held: Held, shape: BlockShape, next_index: torch.Tensor, in_all_rows: bool = False) -> Held:
        """Open a block in the rows whose next token (B,) begins one, all of them or not; return what is held then.

        Returns `held` itself where none was opened; it may be changed in place.
        """
        return open_block(held, shape) if in_all_rows else open_blocks(held, shape, next_index)

    def write_one(self, held: Held, tokens: NewTokens, shape: BlockShape) -> bool:
        """Write a token of each row in place, wherever each row is; False if that is left to PyTorch's operations."""
        return False

    # A step

    def step(
        self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, layer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token, or a few of one block: outputs (B, L, H', P) and features (B, L, 3 H' P).

        Args:
            layer: of the cache, into which the tokens are written.
        """
        return take_step(heads, projected, inputs, layer)

    # A prompt

    def segment_length(self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs) -> int:
        """Tokens of a prompt that `mix` takes at once."""
        return SEGMENT

    def recomputes(self, heads: WindowedHeads, query: torch.Tensor) -> bool:
        """Return True if `mix` is computed once more for its gradient: else scores and probabilities would be kept,
        as much as the rest of the model's memory."""
        return torch.is_grad_enabled() and not is_torchdynamo_compiling()

    def mix(
        self, heads: WindowedHeads, projected: Projected, inputs: HybridInputs, held: Held | None, keeps: bool = False
    ) -> Mixed:
        """Tokens of one segment, in whose rows the block of the first token is open already.

        Args:
            keeps: True if what is held afterwards is asked for; it is None where rows are not alike.
        """
        arguments = heads, projected, inputs, held, keeps
        if self.recomputes(heads, projected.query):
            return checkpoint(self._mix, *arguments, use_reentrant=False)
        return self._mix(*arguments)

    def _mix(self, heads, projected, inputs, held, keeps) -> Mixed:
        shape = heads.shape
        projected = rounded(heads, projected)
        length = projected.query.shape[2]
        tokens = projected.tokens(inputs.index) if keeps else None
        causal = shape.window if held is None and inputs.start == 0 else 0  # tokens that attend to all before them
        begin = None
        if causal:
            first = (t[:, :, :causal] for t in (projected.query, projected.key, projected.value))
            begin = attend_causally(heads, *first)
            if length <= causal:
                fits = tokens is not None and inputs.end_alike
                return begin, None, Held.within_window(shape, tokens) if fits else None
        if not inputs.end_alike or inputs.start is None or inputs.seq_idx is not None:
            tokens = None
        return self.mix_blocks(heads, projected, inputs, held, begin, tokens)

    def mix_blocks(
        self,
        heads: WindowedHeads,
        projected: Projected,
        inputs: HybridInputs,
        held: Held | None,
        begin: torch.Tensor | None,
        tokens: NewTokens | None,
    ) -> Mixed:
        """`mix` once the first tokens, with outputs `begin`, have attended causally; `tokens` if they are kept."""
        layout = layout_of(heads.shape, projected, inputs, held)
        blocks = attend_blocks(self, heads, projected, held, layout)
        last = None if tokens is None else layout.sizes.last - layout.sizes.first
        output, features, state = self.read_states(heads, blocks, held, begin, layout, last)
        if tokens is None:
            return output, features, None
        return output, features, layout.sizes.held_after(held, tokens, blocks.salience, blocks.holders[:, last], state)

    def choose_columns(self, layout: Layout, salience: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout.select`."""
        return layout.select(salience)

    def hide_columns(
        self, layout: Layout, holders: torch.Tensor, until: torch.Tensor, dtype: torch.dtype, shared: int
    ) -> torch.Tensor:
        """See `Layout.bias`."""
        return layout.bias(holders, until, dtype, shared)

    def attend_groups(
        self, heads: WindowedHeads, query: torch.Tensor, keys, values, holders, until, layout: Layout
    ) -> Near:
        """Attention of queries (B, J, K, M/J, R, E, P) to the columns of salient cache and window that they see.

        Args:
            keys, values: (B, K, T, P), all columns. holders, until: of `Layout.select`.
        """
        keys, values = (layout.columns_of_groups(t, holders) for t in (keys, values))
        bias = self.hide_columns(layout, holders, until, query.dtype, heads.shared)
        shape = query.shape
        output, log_mass = attend_of(heads, query.flatten(3, 5), keys, values, bias[:, :, None])
        return output.view(shape), log_mass.view(shape[:-1])

    def read_states(
        self,
        heads: WindowedHeads,
        blocks: Blocks,
        held: Held | None,
        begin: torch.Tensor | None,
        layout: Layout,
        last: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Mix what the states of blocks return into the outputs of softmax attention.

        Returns:
            The outputs of `begin` and of the blocks, the features of the blocks, and the state while block `last` of
            them is open, if that is asked for.
        """
        output = blocks.output
        features = final = None
        if heads.mass is not None:
            state, sums = states_of(blocks, held, layout)
            output, features = read(blocks.query, output, blocks.log_mass, readout(heads, state))
            features = layout.to_tokens(layout.in_order(features).flatten(2))
            if last is not None:  # a part would keep the whole in memory
                final = sums[:, last].clone(memory_format=torch.contiguous_format)
        output = layout.to_tokens(layout.in_order(output))
        if begin is not None:
            output = torch.cat([begin, output], dim=1)
        return output, features, final

    # Mixers, which bring PyTorch's operations with them: None leaves it to these

    def ssd_scan(
        self, x, log_a, B, C, initial_state, seq_idx, chunk_size: int, asked: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The recurrence of mixers/ssd.py.

        Args:
            asked: the setting of the backend, which may name a package.

        Raises:
            ValueError: that cannot be used here, or not for this.
        """
        if asked in ("fla", "mamba_ssm"):
            raise ValueError(
                f"The {asked} backend needs CUDA tensors of at most 32 bits, Triton, and convert-to-hybrid installed; "
                "use backend 'torch'."
            )
        return None

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor | None, activation: str
    ) -> torch.Tensor | None:
        """The convolution (mixers/short_conv.py) of x (B, L, I) from its first token on."""
        return None

    def convolve_one(
        self, x: torch.Tensor, past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
    ) -> torch.Tensor | None:
        """The convolution of one token x (B, 1, I), which is added to `past` (B, I, width), in place."""
        return None
