"""What lies beyond the window, read as softmax would read it.

Per key/value head, over the tokens j that are neither in the window nor sinks nor salient, each with the weight
w_j = a^(number of tokens that came to the state after it), 0 < a <= 1, and with x' for the slow part of x:

    n = sum_j w_j      k_mean = sum_j w_j k'_j / n      v_mean = sum_j w_j v_j / n      S = sum_j w_j v_j k'_j^T

and for each query q, which holds the factor 1 / sqrt(D), or what the teacher has in its place:

    tilt = Cov(v, k') q' = S q' / n - v_mean (k_mean . q')
    log mass = c0 + c1 log n + sum_f alpha_f (q' . k_mean)_f + sum_f beta_f (q . q)_f
    gate = sigmoid(log mass - log-sum-exp of the scores of what the attention sees), 0 while the state is empty
    features = [(1 - gate) y_window, gate v_mean, gate tilt]

Were far keys and values jointly Gaussian and all of a key slow, softmax over them would be v_mean + tilt, with the log
mass log n + q . k_mean + q^T Cov(k, k) q / 2, and the sum of the three features the head's output. Keys are not
Gaussian: c0, c1, alpha and beta of each query head can be fitted to the true log mass, and so can the map that follows
the features. (.)_f is the part of a product in plane f of the rotary embedding, two dimensions each, or in a dimension
that is not rotated: one number for both dimensions of a plane, so that the mass depends on distances alone.

The slow part of a key is what is not rotated and the `hybrid_state_planes` planes that turn slowest. In the others
the angles of far tokens are spread over the circle: their means are near zero, and so is what their covariance tells
of the values, which in the teacher depends on the distance.

Keys, values and queries are the attention's own. A token reaches the state when the attention no longer sees it, so
the attention's cache is all that has to wait, and the state is one matrix: sum_j w_j [v_j; 1] [1; k'_j]^T, with n, the
sums and S in it.

Shapes: B batch, L length, H query heads, K key/value heads, D head dim, N of them in the slow part, F planes and
dimensions that are not rotated, of which E in the slow part, n columns that leave the window.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .hybrid_cache import recorded_by, recurrent_state
from .normalised_read_kernel import can_run, mix_one, read_one
from .ssd import is_recorded, repeat_groups, requested_backend, ssd_advance, ssd_read, ssd_scan
from .ssd_chunked import full_precision
from .window_attention import Near, Projected, WindowInputs, runs


class Far(NamedTuple):
    """The far past as each token sees it, in float32 or wider.

    query (B, L, H, D), scaled. count (B, L, K): n. key_mean (B, L, K, N). value_mean (B, L, K, D). tilt (B, L, H, D).
    """

    query: torch.Tensor
    count: torch.Tensor
    key_mean: torch.Tensor
    value_mean: torch.Tensor
    tilt: torch.Tensor


def theory_mass(config, layer: int) -> torch.Tensor:
    """The mass of far keys that are all alike: c0 = 0, c1 = 1, alpha = 1, beta = 0; (H, 2 + E + F)."""
    slow_parts = config.state_keys(layer) - config.state_planes(layer)
    mass = torch.zeros(config.num_attention_heads, 2 + slow_parts + config.head_dim - config.rotary_planes)
    mass[:, 1 : 2 + slow_parts] = 1.0
    return mass


class NormalisedRead(nn.Module):
    """The equations above, as a scan over many tokens or a step over one.

    log_decay (K,): log a; what is above 0 counts as 0. mass (H, 2 + E + F): c0, c1, alpha, beta of each query head.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.window = config.head_dim, config.window_of(layer_idx)
        self.full_heads = list(config.hybrid_full_heads[layer_idx]) if config.hybrid_full_heads else []
        self.log_decay = nn.Parameter(torch.zeros(self.kv_heads))
        self.planes, self.slow_planes = config.rotary_planes, config.state_planes(layer_idx)
        self.mass = nn.Parameter(theory_mass(config, layer_idx))

    def forward(self, near: Near, seq_idx: torch.Tensor | None = None, cache: Cache | None = None) -> torch.Tensor:
        """The features (B, L, 3 H D), for out_proj."""
        if near.query.shape[1] == 1 and self._one_launch(cache, near.output, near.query, near.context.keys):
            return read_one(
                recurrent_state(cache, self.layer_idx), near.query, near.output, near.log_mass, *near.context[:2],
                near.leaving, self.mass, self.log_decay, self.config.score_scale, self.planes, self.slow_planes,
                self.full_heads,
            )  # fmt: skip
        return self.features(near, self.far(near, seq_idx, cache))

    def _one_launch(self, cache: Cache | None, *inputs: torch.Tensor) -> bool:
        """Whether a kernel takes one token: on CUDA, unless something is recorded or backend "torch" asked for."""
        state = None if cache is None else recurrent_state(cache, self.layer_idx)
        if state is None or not can_run(state.is_cuda, state.dtype, self.heads, self.window):
            return False
        if recorded_by(cache, self.layer_idx) is not None or requested_backend(self.config.mixer_backend) == "torch":
            return False
        return not is_recorded(*inputs, self.mass, self.log_decay)

    def takes_window(self, new: Projected, inputs: WindowInputs, cache: Cache | None) -> bool:
        """Whether a kernel takes one such token with its window and all, so that `mix_one` will do.

        It tells the window's tokens by their number alone, so none may be missing.
        """
        return inputs.all_behind(0) and not inputs.gaps and not self.training and self._one_launch(cache, *new[:4])

    def mix_one(
        self, new: Projected, index: torch.Tensor, of_full: torch.Tensor | None, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`WindowAttention.attend_nearby` and `forward` for one token, by a kernel: (B, 1, H, D) and (B, 1, 3 H D)."""
        layer = cache.layers[self.layer_idx]
        layer.count(1, index.device)
        return mix_one(
            recurrent_state(cache, self.layer_idx), *layer.in_ring(), *new, index, of_full, self.mass, self.log_decay,
            self.config.score_scale, self.config.attn_logit_softcapping or 0.0, self.planes, self.slow_planes,
            self.full_heads,
        )  # fmt: skip

    def features(self, near: Near, far: Far) -> torch.Tensor:
        """What `forward` returns, from what it reads."""
        gate = self.gate(near, far)[..., None]
        features = (1 - gate) * near.output, gate * repeat_groups(far.value_mean, self.heads), gate * far.tilt
        return torch.cat([part.to(near.output.dtype).flatten(2) for part in features], dim=-1)

    def gate(self, near: Near, far: Far) -> torch.Tensor:
        """The share of the far past in each head's attention (B, L, H); 0 on heads with full attention."""
        gate = torch.sigmoid(self.log_mass(far) - near.log_mass)
        gate = torch.where(_of_heads(far.count, self.heads) > 0.5, gate, 0.0)
        for first, last in runs(self.full_heads):
            gate[..., first:last] = 0.0
        return gate

    def log_mass(self, far: Far) -> torch.Tensor:
        """(B, L, H), the product of `mass` with `mass_features`, which are not made."""
        slow, parts = far.key_mean.shape[-1] - self.slow_planes, self.head_dim - self.planes
        c0, c1, alpha, beta = self.mass.to(far.query.dtype).split([1, 1, slow, parts], dim=1)
        alpha = torch.cat([alpha[:, : self.slow_planes], alpha], dim=1)  # (H, N)
        beta = torch.cat([beta[:, : self.planes], beta], dim=1)  # (H, D)
        key_mean, log_count = repeat_groups(far.key_mean, self.heads), _of_heads(_log(far.count), self.heads)
        of_keys, of_query = self.slow(far.query) * alpha * key_mean, far.query * beta * far.query
        return c0[:, 0] + c1[:, 0] * log_count + of_keys.sum(-1) + of_query.sum(-1)

    def mass_features(self, far: Far) -> torch.Tensor:
        """[1, log n, (q' . k_mean)_f, (q . q)_f] of each head, (B, L, H, 2 + E + F)."""
        key_mean, log_count = repeat_groups(far.key_mean, self.heads), _of_heads(_log(far.count), self.heads)
        counts = torch.stack([torch.ones_like(log_count), log_count], dim=-1)
        products = (self.slow(far.query) * key_mean, self.slow_planes), (far.query.square(), self.planes)
        by_plane = [t[..., half:] + F.pad(t[..., :half], (0, t.shape[-1] - 2 * half)) for t, half in products]
        return torch.cat([counts, *by_plane], dim=-1)

    def slow(self, t: torch.Tensor) -> torch.Tensor:
        """The slow part of keys or queries (..., D): (..., N)."""
        if self.slow_planes == self.planes:
            return t
        first, second = self.planes - self.slow_planes, 2 * self.planes - self.slow_planes
        return torch.cat([t[..., first : self.planes], t[..., second:]], dim=-1)

    def far(self, near: Near, seq_idx: torch.Tensor | None = None, cache: Cache | None = None) -> Far:
        """What each of the tokens reads; the cache's state then takes up what has left the window after the last."""
        batch, length, _, D = near.query.shape
        state = None if cache is None else recurrent_state(cache, self.layer_idx)
        recorded = recorded_by(cache, self.layer_idx)
        whole = near.query.to(torch.promote_types(near.query.dtype, torch.float32)) * self.config.score_scale
        query = self.slow(whole)
        tokens, log_a = self._leaving(near, query.dtype)
        S, sums = (None, None) if state is None else (state[..., :D, 1:], _sums(state)[..., None])
        if length == 1 and state is not None and recorded is None:
            with full_precision(query):
                product = (query.view(batch, self.kv_heads, -1, S.shape[-1]) @ S.mT).view(batch, 1, -1, D)
            seen = sums.view(batch, 1, self.kv_heads, -1)
        else:
            before, decays = tokens[:, :-1], log_a[:, :-1]  # one column before each query's own
            ones = before.new_ones(*before.shape[:3], 1)
            of_S = before[..., :D], decays, before[..., D + 1 :], query
            of_sums = before, decays, ones, ones[:, -length:]
            if recorded is not None:
                product, seen = ssd_read(S, *of_S), ssd_read(sums, *of_sums)
            else:
                how = self.config.mixer_chunk_size, requested_backend(self.config.mixer_backend)
                product, S = ssd_scan(*of_S, S, seq_idx, *how)
                seen, sums = ssd_scan(*of_sums, sums, seq_idx, *how)
                above = torch.cat([sums[:, :, :D], S], dim=-1)
                state = torch.cat([above, sums[:, :, D:].mT], dim=-2)
        inputs = tokens[:, 1:, :, : D + 1], log_a[:, 1:], tokens[:, 1:, :, D:]
        if recorded is not None:
            recorded.inputs, recorded.advance = inputs, ssd_advance
        elif cache is not None:
            entered = _enter(state, *(t[:, -1] for t in inputs))
            if entered is not recurrent_state(cache, self.layer_idx):
                cache.update_recurrent_state(entered, self.layer_idx)
        values, count, keys = seen.split([D, 1, query.shape[-1]], dim=-1)
        value_mean, key_mean = (t / count.clamp(min=1) for t in (values, keys))
        spread = repeat_groups(torch.cat([value_mean, key_mean, count.clamp(min=1)], dim=-1), self.heads)
        mean, key, count_of_head = spread.split([D, query.shape[-1], 1], dim=-1)
        tilt = product / count_of_head - mean * (query * key).sum(-1, keepdim=True)
        return Far(whole, count[..., 0], key_mean, value_mean, tilt)

    def _leaving(self, near: Near, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing, then who goes on to the state after each of the steps, and log decays.

        Returns:
            [v, 1, k'] (B, T + 1, K, D + 1 + N), zero where nothing enters the state, and log a (B, T + 1, K), 0
            there.
        """
        enters = near.leaving >= 0
        keys, values = (t.transpose(1, 2).to(dtype) for t in near.context.at(near.leaving)[:2])
        tokens = torch.cat([values, torch.ones_like(keys[..., :1]), self.slow(keys)], dim=-1)
        tokens = tokens * enters[..., None, None].to(dtype)
        decay = self.log_decay.to(dtype)
        decay = decay + (decay.clamp(max=0) - decay).detach()  # at a = 1 a gradient still gets through
        return F.pad(tokens, (0, 0, 0, 0, 1, 0)), F.pad(decay * enters[..., None].to(dtype), (0, 0, 1, 0))

    def matrices(self, near: Near, seq_idx: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate (B, L, H) and the far past unrolled, in float64, without a cache.

        Returns:
            gate and M (2, B, H, L, L): v_mean is M[0] v, tilt M[1] v.
        """
        places, shared = self.config.hybrid_salient, self.heads // self.kv_heads
        keys = self.slow(near.context.keys[:, :, places:].double())
        whole = near.query.transpose(1, 2).double() * self.config.score_scale
        query = self.slow(whole)
        column = torch.arange(places, near.context.index.shape[1], device=keys.device)
        enters = F.pad(near.leaving[:, :-1, None] == column, (0, 0, 1, 0))  # (B, L, L): before each query
        far, entered = enters.cumsum(1) > 0, enters.any(-1).cumsum(1)
        if seq_idx is not None:
            far = far & (seq_idx[:, :, None] == seq_idx[:, None])
        passed = entered[:, :, None] - (enters * entered[:, :, None]).sum(1, keepdim=True)
        log_weight = self.log_decay.double().clamp(max=0)[:, None, None] * passed[:, None]
        weight = log_weight.exp() * far[:, None]  # (B, K, L, L)
        count = weight.sum(-1)
        share = weight / count.clamp(min=1)[..., None]
        key_mean = share @ keys
        share, spread = (t.repeat_interleave(shared, dim=1) for t in (share, key_mean))
        scores = query @ keys.repeat_interleave(shared, dim=1).mT
        tilt = share * (scores - (query * spread).sum(-1, keepdim=True))
        read = Far(whole.transpose(1, 2), count.mT, key_mean.transpose(1, 2), None, None)
        return self.gate(near, read), torch.stack([share, tilt])


def _of_heads(t: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, L, K) -> (B, L, H)."""
    return repeat_groups(t[..., None], heads)[..., 0]


def _log(count: torch.Tensor) -> torch.Tensor:
    """Every far token adds 1, so a count below 1 is none."""
    return count.clamp(min=1).log()


def _sums(state: torch.Tensor) -> torch.Tensor:
    """[sum of v, n, sum of k'] (B, K, D + 1 + N) of a state (B, K, D + 1, N + 1)."""
    return torch.cat([state[..., 0], state[..., -1, 1:]], dim=-1)


def _enter(state: torch.Tensor, x: torch.Tensor, log_a: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """One more token in the state, in place unless autograd is recording."""
    decay = log_a.exp()[..., None, None]
    if is_recorded(state, x, log_a, B):
        return decay * state + x[..., None] * B[..., None, :]
    return state.mul_(decay).addcmul_(x[..., None], B[..., None, :])
