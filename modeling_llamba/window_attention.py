"""Softmax attention to a window and the first tokens (sinks), in constant memory; on chosen heads, to everything.

A query at column t sees the W columns t - W + 1 .. t and the first K tokens of its sequence ("sinks", where softmax
puts what it wants nowhere else: Xiao et al. 2024, StreamingLLM). Up to `hybrid_sink_reach` tokens away a sink is where
it is; from farther on it is seen as from there, since the teacher's rotary embedding has met no greater distance.
With `hybrid_salient` it goes on seeing some of the tokens that have left the window (salient_tokens.py).

Shapes: B batch, L length, H query heads, K key/value heads, R = H // K, D head dim, W window, S sinks, P places of
salient tokens; queries are cut into N blocks of Q, each seeing Q + W - 1 columns.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers.utils import is_torchdynamo_compiling

from .attention import append_keys, attention_function, capped, qk_norms
from .rotary import apply_rotary
from .salient_tokens import compete, compete_once, holders_before
from .ssd import requested_backend, sequence_starts

MIN_BLOCK = 32
FLEX_BLOCK = 128
MIN_FLEX = 128  # queries; of fewer it would run another kernel, made for one
RECOMPILES = 256  # after so many kinds of inputs, models and types in a process, PyTorch would hold all scores


class WindowInputs(NamedTuple):
    """What hybrid layers want to know of the tokens.

    index (B, L): of each token in its sequence, -1 at padding. sink_rotary: cos and sin (B, L, rotary dims) for
    queries that look at sinks, by kind of rotary embedding until `of_layer`, or None where they are the ordinary ones.
    causal_mask: for the heads with full attention, as transformers makes it. least: the smallest index, or None where
    it is not known without waiting for a device. gaps: whether padding stands between tokens of a row.
    """

    index: torch.Tensor
    sink_rotary: dict[str, tuple[torch.Tensor, torch.Tensor]] | tuple[torch.Tensor, torch.Tensor] | None = None
    causal_mask: torch.Tensor | None = None
    least: int | None = None
    gaps: bool = False

    def of_layer(self, rope: str) -> "WindowInputs":
        """The same for a layer with this kind of rotary embedding."""
        return self if self.sink_rotary is None else self._replace(sink_rotary=self.sink_rotary[rope])

    def all_behind(self, tokens: int) -> bool:
        """Whether it is known that so many tokens precede each of these, none of which is padding."""
        return self.least is not None and self.least >= tokens


class Tokens(NamedTuple):
    """Some tokens in columns, in the order of their sequence or, in places of salient tokens, in any.

    keys, values (B, K, n, D). index (B, n): in their sequence, -1 where there is none. salience (B, n): which of them
    take a place when they leave the window, -inf where they may not; None in a layer that has no places.
    """

    keys: torch.Tensor
    values: torch.Tensor
    index: torch.Tensor
    salience: torch.Tensor | None = None

    def at(self, columns: torch.Tensor) -> "Tokens":
        """Copies of the tokens in these columns (B, m), -1 where there is none."""
        none, columns = columns < 0, columns.clamp(min=0)
        keys, values = (_take(t, columns) for t in self[:2])
        salience = None if self.salience is None else self.salience.gather(1, columns).masked_fill(none, -torch.inf)
        return Tokens(keys, values, self.index.gather(1, columns).masked_fill(none, -1), salience)


class Ring(NamedTuple):
    """All that the attention sees beside heads with full attention, as a kernel for one token keeps it: in place.

    keys, values (B, K, S + P + W, D): sinks, places of salient tokens, then the window, token i in column i mod W.
    salience (B, K, P + W) and place_index (B, K, P), the index of who holds a place or -1: of each key/value head its
    own, all alike, as heads do not wait for each other. latest (B, 1): index of the last token.
    """

    keys: torch.Tensor
    values: torch.Tensor
    salience: torch.Tensor
    place_index: torch.Tensor
    latest: torch.Tensor

    @classmethod
    def of(cls, recent: Tokens, first: Tokens, salient: Tokens | None, window: int) -> "Ring":
        """Of the last W - 1 columns, which hold no padding behind their first token, sinks and places."""
        latest, last = recent.index[:, -1:].clone(), recent.index.shape[1] - 1
        at = last - (latest - torch.arange(window, device=latest.device)) % window
        recent = recent.at(at.clamp(min=-1))
        parts = [first, recent] if salient is None else [first, salient, recent]
        keys, values = (torch.cat([part[i] for part in parts], dim=2) for i in (0, 1))
        heads = keys.shape[1]
        if salient is None:
            salience, place_index = keys.new_zeros(len(keys), 1, window, dtype=torch.float32), latest[:, :0]
        else:
            salience = torch.cat([salient.salience, recent.salience], dim=1)[:, None]
            place_index = salient.index
        of_heads = (t.expand(-1, heads, -1).contiguous() for t in (salience, place_index[:, None]))
        return cls(keys, values, *of_heads, latest)

    def in_order(self) -> tuple[Tokens, Tokens, Tokens | None]:
        """The last W - 1 columns, sinks and places, each in the order of the text."""
        places = self.place_index.shape[-1]
        window = self.salience.shape[-1] - places
        sinks = self.keys.shape[2] - window - places
        index = self.latest + torch.arange(2 - window, 1, device=self.latest.device)
        recent = self._tokens(sinks + places + index % window, index.clamp(min=-1))
        index = torch.arange(sinks, device=self.latest.device).expand(len(index), -1)
        first = self._tokens(index, index.masked_fill(index > self.latest, -1))._replace(salience=None)
        index, order = self.place_index[:, 0].sort()
        return recent, first, self._tokens(sinks + order, index) if places else None

    def _tokens(self, columns: torch.Tensor, index: torch.Tensor) -> Tokens:
        """Copies of what is in these columns, whose tokens are these (B, n)."""
        places, every = self.place_index.shape[-1], self.salience[:, 0]
        salience = None
        if places:
            at = columns - self.keys.shape[2] + every.shape[1]
            salience = every.gather(1, at.clamp(min=0)).masked_fill(index < 0, -torch.inf)
        return Tokens(_take(self.keys, columns), _take(self.values, columns), index, salience)


class Selection(NamedTuple):
    """Which tokens hold a place when, and which go on to the state, as columns: first the places', then the context's.

    leaving (B, T): who goes on to the state after each step, -1 where nobody does. The steps are the tokens since the
    cache's state. held (B, N, P): who holds a place when a block begins. seen (B, N, Q, P + Q): whether a query sees
    them, and those that left the window since the block began. after (B, P): who holds a place at the end. The last
    three are None in a layer without places.
    """

    leaving: torch.Tensor
    held: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    after: torch.Tensor | None = None


class Near(NamedTuple):
    """The attention to window and sinks: what a read of the far past is weighed against, and fed with.

    output (B, L, H, D). log_mass (B, L, H): log-sum-exp of the scores, or None where no read asks for it.
    query (B, L, H, D), after norm and rotary embedding. context: the places of salient tokens, the columns that the
    cache remembers, then the new. leaving: see `Selection`; None where there is no state to go to.
    """

    output: torch.Tensor
    log_mass: torch.Tensor | None
    query: torch.Tensor
    context: Tokens
    leaving: torch.Tensor | None


class Projected(NamedTuple):
    """What the attention computes of each token by itself.

    query, sink_query (B, H, L, D): after norm and rotary embedding; the second looks at sinks. key, value
    (B, K, L, D). salience (B, L), or None in a layer that has no places.
    """

    query: torch.Tensor
    sink_query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    salience: torch.Tensor | None


class FullHeads(nn.Module):
    """The attributes that transformers' attention functions read of a module, for heads with full attention."""

    def __init__(self, config, layer_idx: int, groups: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_key_value_groups, self.is_causal = groups, True


class WindowAttention(nn.Module):
    """The teacher's attention without its o_proj, restricted to a window and sinks."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.window, self.sinks, self.places = config.window_of(layer_idx), config.hybrid_sinks, config.hybrid_salient
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling, self.softcap = config.score_scale, config.attn_logit_softcapping
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.q_norm, self.k_norm = qk_norms(config)
        # fitted, not trained: which tokens are seen is no smooth function of it
        self.register_buffer("salience", torch.zeros(config.hidden_size) if self.places else None)
        self.full_heads = [] if config.hybrid_full_heads is None else list(config.hybrid_full_heads[layer_idx])
        kv_of = [head // (self.heads // self.kv_heads) for head in self.full_heads]
        self.full_kv_heads = sorted(set(kv_of))
        counts = {kv_of.count(kv) for kv in self.full_kv_heads}
        even = len(counts) == 1 and kv_of == sorted(kv_of)
        # where the heads of a key/value head differ in number, each has its copy of the keys
        self._kv_place = None if even else [self.full_kv_heads.index(kv) for kv in kv_of]
        self.full = FullHeads(config, layer_idx, counts.pop() if even else 1) if self.full_heads else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        inputs: WindowInputs,
        seq_idx: torch.Tensor | None = None,
    ) -> Near:
        """The heads' outputs from hidden states (B, L, hidden), and what a read of the far past needs beside them."""
        projected = self.project(hidden_states, position_embeddings, inputs)
        of_full = self.attend_fully(projected, inputs.causal_mask, None)
        return self.attend_nearby(projected, inputs, of_full, None, seq_idx)

    def attend_nearby(
        self,
        projected: Projected,
        inputs: WindowInputs,
        of_full: torch.Tensor | None,
        past=None,
        seq_idx: torch.Tensor | None = None,
    ) -> Near:
        """The heads' outputs from tokens that are projected.

        Args:
            of_full: (B, L, heads, D) of the heads with full attention, in the order of `full_heads`; None without any.
            past: the layer of the cache to continue from and to update, or None.
        """
        query, sink_query, key, value, salience = projected
        new = Tokens(key, value, inputs.index, salience)
        recent = None if past is None else past.recent
        context = with_past(new, recent)
        since = 0 if past is None else past.since
        seen = with_past(context, self._places(context, past)) if self.places else context
        one = recent is not None and key.shape[2] == 1 and inputs.all_behind(self.sinks) and not self.training
        if one and seen.index.shape[1] <= self.places + self.window:  # unless passes are recorded
            selection, sinks = self._select_once(seen), past.first
            output, log_mass = self.attend_one(query, sink_query, seen, sinks)
        else:
            selection = self._select(seen, key.shape[2], since, seq_idx)
            sinks = self.find_sinks(new, seq_idx, None if past is None else past.first)
            output, log_mass = self.attend(query, sink_query, seen, selection, sinks, seq_idx)
        if of_full is not None:
            output = self.with_full_heads(output, of_full)
        if past is not None:
            past.keep(context, sinks, new.index.shape[1], seen.at(selection.after) if self.places else None)
        log_mass = None if log_mass is None else log_mass.transpose(1, 2)
        leaving = None if selection is None else selection.leaving
        return Near(output.transpose(1, 2), log_mass, query.transpose(1, 2), seen, leaving)

    def materialize(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        inputs: WindowInputs,
        seq_idx: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention matrix M (B, H, L, L) and v (B, H, L, D): the heads' outputs are M v."""
        query, sink_query, key, value, salience = self.project(hidden_states, position_embeddings, inputs)
        unit, parts = torch.eye(key.shape[2], dtype=key.dtype, device=key.device), []
        for some in unit.split(self.head_dim, dim=1):  # whose outputs are columns of M
            values = F.pad(some, (0, self.head_dim - some.shape[1])).expand(*key.shape[:2], -1, -1)
            new = Tokens(key, values, inputs.index, salience)
            seen = with_past(new, self._places(new, None)) if self.places else new
            selection = self._select(seen, key.shape[2], 0, seq_idx)
            sinks = self.find_sinks(new, seq_idx, None)
            output, _ = self.attend(query, sink_query, seen, selection, sinks, seq_idx)
            if self.full_heads:
                one = Projected(query, sink_query, key, values, None)
                output = self.with_full_heads(output, self.attend_fully(one, inputs.causal_mask, None))
            parts.append(output[..., : some.shape[1]])
        return torch.cat(parts, -1), value.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        inputs: WindowInputs,
    ) -> Projected:
        """Queries, keys, values and salience of tokens (B, L, hidden)."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        cos, sin = position_embeddings
        rotated = apply_rotary(query, cos, sin, head_dim_axis=1)
        sink_query = rotated
        if inputs.sink_rotary is not None and self.sinks:
            sink_query = apply_rotary(query, *inputs.sink_rotary, head_dim_axis=1)
        salience = self._salience_of(hidden_states, inputs.index)
        return Projected(rotated, sink_query, apply_rotary(key, cos, sin, head_dim_axis=1), value, salience)

    def _salience_of(self, hidden_states: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """(B, L), in float32 or wider; sinks and padding take no place."""
        if self.salience is None:
            return None
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        salience = (hidden_states.detach().to(wide) * self.salience.to(wide)).sum(-1)
        return salience.masked_fill(index < self.sinks, -torch.inf)

    def _places(self, context: Tokens, past) -> Tokens:
        """The tokens that hold a place before this pass; nobody at first."""
        if past is not None and past.salient is not None:
            return past.salient
        nobody = context.index.new_full((len(context.index), self.places), -1)
        return context.at(nobody)

    def _select(self, seen: Tokens, length: int, since: int, seq_idx: torch.Tensor | None) -> Selection | None:
        """What becomes of the tokens that leave the window; None where neither places nor a read want to know.

        Args:
            seen: places, then the columns that the cache remembers, then `length` new ones.
            since: how many of the columns before the new ones came after the cache's places and state.
        """
        if not self.places and self.config.hybrid_read == "linear":
            return None
        entering = leaving_window(seen.index, self.places, self.window, length + since)
        entering = entering.masked_fill(seen.index.gather(1, entering.clamp(min=0)) < self.sinks, -1)
        if seq_idx is not None:  # whoever leaves is for the next query, if that is of the same sequence
            seq_idx = sequence_starts(seq_idx).cumsum(1)
            of_column, of_query = F.pad(seq_idx, (self.places, 0), value=-2), F.pad(seq_idx, (0, 1), value=-3)
            entering = entering.masked_fill(of_column.gather(1, entering.clamp(min=0)) != of_query[:, 1:], -1)
        if not self.places:
            return Selection(entering)
        held = torch.arange(self.places, device=entering.device).expand(len(entering), -1)
        held, leaving = held.masked_fill(seen.index[:, : self.places] < 0, -1), []
        if since:
            before = compete(held, entering[:, :since], seen.salience)
            held, entering = before.held, entering[:, since:]
            leaving.append(before.leaving)
        block = self._block(length)
        right = -length % block
        entering = F.pad(entering, (0, right), value=-1).unflatten(1, (-1, block))
        packed = None
        if seq_idx is not None:
            packed = of_column, F.pad(of_query, (0, right), value=-3).unfold(1, block + 1, block)
        held = holders_before(held, entering, seen.salience, packed)
        outcome = compete(held, entering, seen.salience, packed)
        leaving = torch.cat([*leaving, outcome.leaving.flatten(1)], dim=1)[:, : length + since]
        return Selection(leaving, held, outcome.seen.mT, outcome.held[:, -1])

    def _select_once(self, seen: Tokens) -> Selection | None:
        """`_select` for one token a row, behind the sinks, where nothing came since the cache's places."""
        if not self.places and self.config.hybrid_read == "linear":
            return None
        first, places = seen.index[:, : self.places + 1], self.places
        if seen.index.shape[1] < places + self.window:
            first = F.pad(first[:, :places], (0, 1), value=-1)  # nobody leaves the window yet
        if not places:
            return Selection(torch.where(first >= self.sinks, 0, -1))
        leaving, after = compete_once(first >= self.sinks, seen.salience[:, : places + 1])
        return Selection(leaving, after=after)

    def _block(self, length: int) -> int:
        """Queries that are served at a time."""
        return min(length, max(self.window, MIN_BLOCK))

    def find_sinks(self, new: Tokens, seq_idx: torch.Tensor | None, before: Tokens | None) -> Tokens:
        """The first S tokens of each row, from the cache or the new ones; of each token's own sequence when packed.

        Returns:
            Keys and values (B, K, S, D) and index (B, S); when packed (B, K, L, S, D) and (B, L, S).
        """
        wanted = torch.arange(self.sinks, device=new.index.device)
        length = new.index.shape[1]
        if seq_idx is not None:
            columns = torch.arange(length, device=new.index.device)[:, None] - new.index[..., None] + wanted
            index = torch.where(new.index[..., None] >= wanted, wanted, -1)
            keys, values = (_take(t, columns.clamp(0, length - 1)) for t in (new.keys, new.values))
            return Tokens(keys, values, index)
        found = new.index[:, None] == wanted[:, None]
        exists, columns = found.any(-1), found.int().argmax(-1)
        keys, values = (_take(t, columns) for t in (new.keys, new.values))
        if before is None:
            return Tokens(keys, values, torch.where(exists, wanted, -1))
        mine = exists[:, None, :, None]
        keys, values = torch.where(mine, keys, before.keys), torch.where(mine, values, before.values)
        return Tokens(keys, values, torch.where(exists, wanted, before.index))

    def attend(
        self,
        query: torch.Tensor,
        sink_query: torch.Tensor,
        context: Tokens,
        selection: Selection | None,
        sinks: Tokens,
        seq_idx: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One softmax over sinks and window: (B, H, L, D), and if a read asks for it the log-sum-exp (B, H, L).

        Args:
            query, sink_query: (B, H, L, D). context: places, columns before the queries', W - 1 of which count, then
            theirs. sinks: see `find_sinks`.
        """
        batch, heads, length, dim = query.shape
        if self._by_flex(query):
            until = self._seen_until(context.index, selection, length, seq_idx)
            return self._attend_by_flex(query, sink_query, context, until, sinks)
        block, places = self._block(length), context
        blocks = -(-length // block)
        right = blocks * block - length
        if self.places:
            context = Tokens(*(t[:, :, self.places :] for t in context[:2]), context.index[:, self.places :])
        left = self.window - 1 + length - context.index.shape[1]
        keys, values = (
            F.pad(t, (0, 0, left, right)).unfold(2, block + self.window - 1, block)
            for t in (context.keys, context.values)
        )  # (B, K, N, D, Q + W - 1)
        index = F.pad(context.index, (left, right), value=-1).unfold(1, block + self.window - 1, block)
        query, sink_query = (
            F.pad(t, (0, 0, 0, right)).reshape(batch, self.kv_heads, -1, blocks, block, dim)
            for t in (query, sink_query)
        )  # (B, K, R, N, Q, D)
        band = torch.ones(block, block + self.window - 1, dtype=torch.bool, device=query.device)
        seen = band.triu().tril(self.window - 1) & (index >= self.sinks)[:, :, None]  # (B, N, Q, Q + W - 1)
        if seq_idx is not None:
            padded = F.pad(seq_idx, (self.window - 1, right), value=-1)
            of_key = padded.unfold(1, block + self.window - 1, block)
            of_query = padded[:, self.window - 1 :].reshape(batch, blocks, block)
            seen = seen & (of_key[:, :, None] == of_query[..., None])
        if self.places:
            held, left_since = selection.seen.split([self.places, block], dim=-1)
            seen = torch.cat([seen[..., :block] | left_since, seen[..., block:]], dim=-1)
            place_keys, place_values = (_take(t, selection.held.clamp(min=0)) for t in places[:2])  # (B, K, N, P, D)
        scores = self.scores(query, keys[:, :, None], seen[:, None, None])
        if self.places:
            scores = torch.cat([self.scores(query, place_keys[:, :, None].mT, held[:, None, None]), scores], dim=-1)
        if self.sinks:
            own = F.pad(context.index[:, -length:], (0, right), value=-1).reshape(batch, blocks, block)
            sink_scores = self._sink_scores(sink_query, sinks, own, right)
            scores = torch.cat([sink_scores, scores], dim=-1)
        probabilities, log_mass = self._softmax(scores, query.dtype)
        probabilities = F.dropout(probabilities, self.config.attention_dropout, self.training)
        output = probabilities[..., self.sinks + self.places :] @ values[:, :, None].transpose(-1, -2)
        if self.places:
            of_places = probabilities[..., self.sinks : self.sinks + self.places]
            output = output + of_places @ place_values[:, :, None]
        if self.sinks:
            output = output + self._sink_values(probabilities[..., : self.sinks], sinks, right)
        if log_mass is not None:
            log_mass = log_mass.reshape(batch, heads, -1)[:, :, :length]
        return output.reshape(batch, heads, blocks * block, dim)[:, :, :length], log_mass

    def _by_flex(self, query: torch.Tensor) -> bool:
        """Whether flex_attention sees to the window: on CUDA, of a prompt, unless backend "torch" is asked for."""
        if query.shape[2] < MIN_FLEX or (self.training and self.config.attention_dropout):
            return False
        asked = requested_backend(self.config.mixer_backend)
        return asked != "torch" and can_flex(query.is_cuda, query.dtype, self.head_dim)

    def _attend_by_flex(self, query, sink_query, context: Tokens, until: torch.Tensor, sinks: Tokens):
        """`attend` without scores in memory: a kernel for window and places, joined with the sinks by log-sum-exps."""
        batch, heads, length, dim = query.shape
        softcap = self.softcap

        def cap(score, b, h, i, j):
            return softcap * torch.tanh(score / softcap)

        attend = flex_attention if is_torchdynamo_compiling() else compiled_flex_attention()
        output, aux = attend(
            *(t.to(context.values.dtype) for t in (query, *context[:2])),  # autocast leaves them unlike
            None if softcap is None else cap, blocks_seen(until, length),
            scale=self.scaling, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        log_mass = aux.lse.clamp(min=torch.finfo(aux.lse.dtype).min)
        if self.sinks:
            sink_query = sink_query.reshape(batch, self.kv_heads, -1, 1, length, dim)
            scores = self._sink_scores(sink_query, sinks, context.index[:, None, -length:], 0)
            near, log_mass = log_mass, torch.logaddexp(log_mass, scores.logsumexp(-1).view(log_mass.shape))
            share = (scores - log_mass.view(scores.shape[:-1])[..., None]).exp().to(query.dtype)
            of_sinks = self._sink_values(share, sinks, 0).reshape(output.shape)
            output = (near - log_mass).exp()[..., None].to(output.dtype) * output + of_sinks
        return output, log_mass if self.config.hybrid_read == "normalised" else None

    def _seen_until(self, index, selection, length, seq_idx) -> torch.Tensor:
        """From which query on a column is no longer seen (B, columns), as it has left the window and holds no place,
        or another sequence has begun; 0 for sinks, which are seen to apart, and where there is no token."""
        columns = index.shape[1]
        if self.places:
            leaving = torch.where(selection.leaving >= 0, selection.leaving, columns)
            after = torch.arange(1, leaving.shape[1] + 1, device=index.device) + length - leaving.shape[1]
            until = index.new_full((len(index), columns + 1), length)
            until = until.scatter(1, leaving, after.expand_as(leaving))[:, :columns]
        else:
            until = torch.arange(columns, device=index.device) + self.window + length - columns
        until = torch.where(index < self.sinks, 0, until)
        if seq_idx is not None:
            number = torch.arange(length, device=index.device)
            starts = F.pad(torch.where(sequence_starts(seq_idx), number, length)[:, 1:], (0, 1), value=length)
            ends = starts.flip(1).cummin(1).values.flip(1)
            until = torch.minimum(until, F.pad(ends, (self.places, 0), value=0))
        return until.int()

    def attend_one(
        self, query: torch.Tensor, sink_query: torch.Tensor, sight: Tokens, sinks: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`attend` for one token a row, all of them behind the sinks: (B, H, 1, D) and (B, H, 1).

        Args:
            sight: what is seen beside the sinks, in any order.
        """
        batch, heads, _, dim = query.shape
        keys, values = sight[:2]
        query, sink_query = (t.reshape(batch, self.kv_heads, -1, dim) for t in (query, sink_query))
        scores = self.scores(query, keys.mT, (sight.index >= self.sinks)[:, None, None])
        if self.sinks:
            scores = torch.cat([self.scores(sink_query, sinks.keys.mT), scores], dim=-1)
        probabilities, log_mass = self._softmax(scores, query.dtype)
        output = probabilities[..., self.sinks :] @ values
        if self.sinks:
            output = output + probabilities[..., : self.sinks] @ sinks.values
        log_mass = None if log_mass is None else log_mass.view(batch, heads, 1)
        return output.view(batch, heads, 1, dim), log_mass

    def _softmax(self, scores, dtype):
        """Probabilities in `dtype`, and the log-sum-exp of the scores if a read asks for it."""
        probabilities, log_mass = scores.softmax(-1), None
        if self.config.hybrid_read == "normalised":  # without a second exponential of every score
            log_mass = scores.amax(-1) - probabilities.amax(-1).log()
        return probabilities.to(dtype), log_mass

    def scores(self, query, keys, seen=None):
        """Scaled and perhaps capped products in float32 or wider; the least number where a key is not seen."""
        scores = (query @ keys).to(torch.promote_types(query.dtype, torch.float32)) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if seen is None else scores.masked_fill(~seen, torch.finfo(scores.dtype).min)

    def _sink_scores(self, query, sinks: Tokens, own, right):
        """(B, K, R, N, Q, S), masked where the query is not behind the sink."""
        if sinks.keys.ndim == 4:  # the same sinks for the whole row
            seen = (sinks.index >= 0)[:, None, None] & (sinks.index[:, None, None] <= own[..., None])
            return self.scores(query, sinks.keys[:, :, None, None].transpose(-1, -2), seen[:, None, None])
        keys, index = self._blocked(sinks.keys, sinks.index, own, right)
        seen = (index >= 0)[:, None, None]
        return self.scores(query[..., None, :], keys.transpose(-1, -2), seen[..., None, :])[..., 0, :]

    def _sink_values(self, probabilities, sinks: Tokens, right):
        if sinks.values.ndim == 4:
            return probabilities @ sinks.values[:, :, None, None]
        blocks, block = probabilities.shape[3:5]
        values = F.pad(sinks.values, (0, 0, 0, 0, 0, right)).unflatten(2, (blocks, block))[:, :, None]
        return (probabilities[..., None, :] @ values)[..., 0, :]

    def _blocked(self, keys, index, own, right):
        """Every query's own sinks, in blocks: (B, K, 1, N, Q, S, D) and (B, N, Q, S)."""
        blocks, block = own.shape[1:]
        keys = F.pad(keys, (0, 0, 0, 0, 0, right)).unflatten(2, (blocks, block))[:, :, None]
        return keys, F.pad(index, (0, 0, 0, right), value=-1).unflatten(1, (blocks, block))

    def attend_fully(self, projected: Projected, causal_mask, past, **kwargs) -> torch.Tensor | None:
        """Full attention of the heads that have it, (B, L, heads, D); None without any."""
        if not self.full_heads:
            return None
        key, value = (_heads(t, self.full_kv_heads) for t in (projected.key, projected.value))
        if past is not None:
            key, value = append_keys(past.full, key, value)
        if self._kv_place is not None:
            key, value = _heads(key, self._kv_place), _heads(value, self._kv_place)
        of_full, _ = attention_function(self.config)(
            self.full.train(self.training),
            _heads(projected.query, self.full_heads),
            key,
            value,
            causal_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **capped(self.softcap),
            **kwargs,
        )
        return of_full

    def with_full_heads(self, output: torch.Tensor, of_full: torch.Tensor) -> torch.Tensor:
        """The heads' outputs (B, H, L, D) with those of full attention in their places."""
        both = torch.cat([output, of_full.transpose(1, 2).to(output.dtype)], dim=1)
        place = {head: self.heads + i for i, head in enumerate(self.full_heads)}
        return _heads(both, [place.get(head, head) for head in range(self.heads)])


@functools.cache
def compiled_flex_attention() -> Callable:
    """PyTorch's; as it is it would hold all scores in memory, and so it would once it is not compiled any more."""
    compiled = torch.compile(flex_attention)

    def attend(*args, **kwargs):
        with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
            return compiled(*args, **kwargs)

    return attend


def can_flex(on_cuda: bool, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flex_attention is a kernel here, for queries of this type and size."""
    return on_cuda and dtype != torch.float64 and head_dim >= 16 and find_spec("triton") is not None


def blocks_seen(until: torch.Tensor, length: int) -> BlockMask:
    """A mask for flex_attention, of blocks, where the last `length` columns are the queries: number i sees the columns
    up to its own whose `until` (B, columns) is above i."""
    columns = until.shape[1]
    own = torch.arange(columns - length, columns, device=until.device, dtype=torch.int32)
    size, right = FLEX_BLOCK, -columns % FLEX_BLOCK
    first = torch.arange(0, length, size, device=until.device)  # queries
    last = (first + size).clamp(max=length) - 1 + columns - length
    begins = torch.arange(0, columns, size, device=until.device)
    seen_until = F.pad(until, (0, right)).unflatten(1, (-1, size)).amax(-1)
    seen = (seen_until[:, None] > first[:, None]) & (begins <= last[:, None])
    numbers = seen.sum(-1, dtype=torch.int32)[:, None]
    indices = seen.int().argsort(dim=-1, descending=True, stable=True).int()[:, None]

    def mask(b, h, i, j):
        return (j <= own[i]) & (i < until[b, j])

    return BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=size, mask_mod=mask, seq_lengths=(length, columns))


def with_past(new: Tokens, recent: Tokens | None) -> Tokens:
    """The columns the cache remembers, then the new ones."""
    if recent is None:
        return new
    keys, values = (torch.cat(pair, dim=2) for pair in zip(recent[:2], new[:2], strict=True))
    salience = None if new.salience is None else torch.cat([recent.salience, new.salience], dim=1)
    return Tokens(keys, values, torch.cat([recent.index, new.index], dim=1), salience)


def leaving_window(index: torch.Tensor, places: int, window: int, steps: int) -> torch.Tensor:
    """The column that leaves the window after each of the last `steps` columns (B, steps), -1 where there is none.

    Args:
        index: (B, n), of as many places of salient tokens, then of the columns in their order.
    """
    last = index.shape[1]
    columns = torch.arange(last - steps, last, device=index.device).expand(len(index), -1) - window + 1
    columns = columns.masked_fill(columns < places, -1)
    return columns.masked_fill(index.gather(1, columns.clamp(min=0)) < 0, -1)


def _heads(t: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """Some heads, in that order, of (B, heads, L, D); cut, as an index would have to be sent to the device."""
    parts = [t[:, first:last] for first, last in runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as ranges: [3, 4, 5, 1] is [(3, 6), (1, 2)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def _take(tokens: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(B, K, L, D) at columns (B, ...) -> (B, K, ..., D)."""
    flat = columns.flatten(1)[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[-1])
    return tokens.gather(2, flat).unflatten(2, columns.shape[1:])
