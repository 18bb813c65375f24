"""Map a layer's attention tensors to its mixer's: Q -> C, K -> B, V -> x, O -> out_proj.

With decay 1, an open gate, an identity convolution and no activation, the mixer's unrolled matrix is then the
teacher's attention before the softmax, Q K^T / sqrt(head dim), causal, head by head (Wang et al. 2024, section 2).

Query head h reads key/value head h // (H // K), so key/value weights are repeated in whole head blocks, and only
where the mixer has a head of x and B per query head.

Shapes: D model width, H heads, K key/value heads, R heads per key/value head, G groups, U states, P head dim, N state.
"""

import math
from collections.abc import Callable, Iterator

import torch

from modeling_llamba.hybrid.readout import theory_mass
from modeling_llamba.mixers.matrix_mixer import OPEN_GATE

from ..io.reader import Checkpoint
from ..io.rules import Rule, Source, in_blocks, rule_of

# sigmoid(100) is 1 in every float type, and 100 is exact in all of them
CERTAIN = 100.0
UNIT_STEP = math.log(math.e - 1)  # softplus(UNIT_STEP) = 1

Blocks = Callable[[Checkpoint], Iterator[torch.Tensor]]


def repeat_heads(weight: torch.Tensor, kv_heads: int, heads: int) -> torch.Tensor:
    """(K P, ...) -> (H P, ...): every block of P rows repeated for the query heads that share it."""
    return weight.unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, dim=0).flatten(0, 1)


def compress_pair(q: torch.Tensor, k: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best C, B of `rank` rows per head with C^T B ~ q^T k, over all query heads that share the key head.

    Args:
        q: (R, P, D') weights of R query heads. k: (P, D').

    Returns:
        C (R, rank, D') and B (rank, D'), by truncated SVD of the stacked (R D', D') products.
    """
    R, P, D = q.shape
    left = torch.linalg.qr(q.double().transpose(1, 2).reshape(R * D, P))
    right = torch.linalg.qr(k.double().T)
    # q^T k has rank P at most, so the SVD of its P x P core is that of the whole
    u, s, vh = torch.linalg.svd(left.R @ right.R.T)
    root = s[:rank].sqrt()
    C = (left.Q @ (u[:, :rank] * root)).view(R, D, rank).transpose(1, 2)
    return C, (right.Q @ (vh[:rank].T * root)).T


class LayerMapping:
    """The rules of one replaced layer."""

    def __init__(self, config, layer: int, sources: dict[str, Source], initial_decay: float, seed: int):
        self.config = config
        self.layer = layer
        self.seed = seed
        self.decay = initial_decay
        self.prefix = f"model.layers.{layer}."
        attention = f"{self.prefix}self_attn."
        self.attention = {n.removeprefix(attention): s for n, s in sources.items() if n.startswith(attention)}
        self.H = config.num_attention_heads
        self.K = config.num_key_value_heads
        self.G = config.mixer_num_kv_heads
        self.N = config.mixer_d_state
        self.U = config.mixer_num_heads
        if config.mixer_shared_state:
            self.U = self.G
        self.P = config.head_dim
        assert config.mixer_head_dim == self.P, "x are the teacher's values"
        self.D = config.hidden_size
        self.qk_width = self.N  # features of B and C per head
        if config.mixer == "mamba1":
            self.qk_width = self.P
        self.has_bias = "q_proj.bias" in self.attention
        self.is_hybrid = config.layer_types[layer] == "hybrid"
        # with a norm on queries and keys the 1 / sqrt(P) goes into the norm's weight
        self.q_scale = config.score_scale
        if config.mixer_qk_norm:
            self.q_scale = 1.0

    def rules(self, shapes: dict[str, tuple[int, ...]]) -> list[Rule]:
        """A rule for each of the mixer's parameters."""
        rules = []
        for target, shape in shapes.items():
            name = target.removeprefix(f"{self.prefix}mixer.")
            if self.is_hybrid and name in self.attention:
                rules.append(rule_of(target, self.attention[name]))
                continue
            sources, blocks = self._rule(name, shape)
            kind = "derived" if sources else "initialised"
            names = tuple(dict.fromkeys(name for s in sources for name in self.attention[s].names))
            rules.append(Rule(target, shape, kind, names, blocks))
        return rules

    def _rule(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], Blocks]:
        biases = ()
        if self.has_bias:
            biases = ("v_proj.bias", "k_proj.bias", "q_proj.bias")
        if name == "in_proj.weight":
            return ("v_proj.weight", "k_proj.weight", "q_proj.weight"), self._in_proj
        if name == "in_proj.bias":
            return biases, lambda c: iter([self._in_proj_bias(c)])
        if name == "conv1d.bias" and self.has_bias and not self.config.mixer_in_bias:
            return biases, lambda c: iter([torch.cat(list(self._projections(c, "bias").values()))])
        if name == "out_proj.weight":
            return ("o_proj.weight",), self.attention["o_proj.weight"].blocks
        if name == "out_proj.bias" and "o_proj.bias" in self.attention:
            return ("o_proj.bias",), lambda c: iter([self.attention["o_proj.bias"].read(c)])
        if name.startswith(("B_norm", "C_norm")):
            side, kind = name.split(".")
            source = f"k_norm.{kind}"
            scale = 1.0
            if side == "C_norm":
                source = f"q_norm.{kind}"
                scale = self.config.score_scale
            return (source,), lambda c: iter([self._norm(c, source, shape) * scale])
        return (), lambda c: self._initialised(name, shape)

    def _norm(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a norm's weight for the mixer's norm, which adds no 1 to it and has a weight for each head."""
        weight = self.attention[name].read(checkpoint).float() + float(self.config.norm_unit_offset)
        if weight.shape == shape:
            return weight
        return repeat_heads(weight, self.K, self.H)

    def _projections(self, checkpoint: Checkpoint, kind: str) -> dict[str, torch.Tensor]:
        """Return x, B and C of `kind` (weight or bias) in float32, with as many heads as the mixer has."""
        v, k, q = (self.attention[f"{p}_proj.{kind}"].read(checkpoint).float() for p in "vkq")
        if self.qk_width < self.P:
            k, q = self._compressed(checkpoint)[kind]
        elif self.qk_width > self.P:
            k, q = self._padded(k, self.K), self._padded(q, self.H)
        if self.G != self.K:
            v, k = repeat_heads(v, self.K, self.H), repeat_heads(k, self.K, self.H)
        return {"x": v, "B": k, "C": q * self.q_scale}

    def _padded(self, weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Zero rows behind the P rows of each head."""
        padded = weight.new_zeros(heads, self.qk_width, *weight.shape[1:])
        padded[:, : self.P] = weight.unflatten(0, (heads, self.P))
        return padded.flatten(0, 1)

    def _compressed(self, checkpoint: Checkpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """B and C of N < P features per head, biases included, with C . B as close to q . k as possible."""
        q, k = (self.attention[f"{p}_proj.weight"].read(checkpoint).float() for p in "qk")
        if self.has_bias:
            q_bias, k_bias = (self.attention[f"{p}_proj.bias"].read(checkpoint).float() for p in "qk")
            q, k = torch.cat([q, q_bias[:, None]], 1), torch.cat([k, k_bias[:, None]], 1)
        q, k = q.view(self.K, self.H // self.K, self.P, -1), k.view(self.K, self.P, -1)
        pairs = [compress_pair(q_group, k_head, self.N) for q_group, k_head in zip(q, k, strict=True)]
        C = torch.cat([C for C, _ in pairs]).flatten(0, 1).float()
        B = torch.cat([B for _, B in pairs]).float()
        return {
            "weight": (B[:, : self.D], C[:, : self.D]),
            "bias": (B[:, self.D :].flatten(), C[:, self.D :].flatten()),
        }

    def _in_proj(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        inner = self.H * self.P
        dt_rows = self.config.mixer_dt_rank or self.U
        # a gate with a bias is opened by that, and starts without weights
        zeros = in_blocks(inner, lambda a, b: torch.zeros(b - a, self.D), 4 * self.D)
        gate = zeros
        if not self.config.mixer_gate_bias:
            gate = iter([self._uniform("z", (inner, self.D))])
        steps = torch.zeros(dt_rows, self.D)
        if self.config.mixer == "mamba1":
            # its dt_proj starts at zero, so these rows must not, or no gradient would reach either
            steps = self._uniform("dt", (dt_rows, self.D))
        if self.config.mixer != "discrete_mamba2":
            yield from gate
        yield from self._projections(checkpoint, "weight").values()
        if self.config.mixer == "discrete_mamba2":
            yield from gate
        yield steps

    def _in_proj_bias(self, checkpoint: Checkpoint) -> torch.Tensor:
        inner = self.H * self.P
        dt_rows = self.config.mixer_dt_rank or self.U
        gate = torch.zeros(inner)
        steps = torch.zeros(dt_rows)
        streams = list(self._projections(checkpoint, "bias").values())
        if self.config.mixer == "discrete_mamba2":
            in_order = [*streams, gate, steps]
        else:
            in_order = [gate, *streams, steps]
        return torch.cat(in_order)

    def _initialised(self, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Values of parameters no teacher has: open gates, an identity convolution, the decay that was asked for."""
        if name == "conv1d.weight":  # the last tap is the current token
            value = torch.zeros(shape)
            value[..., -1] = 1.0
        elif name == "mass":
            value = theory_mass(self.config, self.layer)
        elif name == "down.weight":
            value = self._uniform(name, shape)
        else:
            constants = {
                "A_log_bias": decay_logit(self.decay),
                "A_log": log_rate(self.decay),
                "dt_bias": UNIT_STEP,
                "dt_proj.bias": UNIT_STEP,
                "z_bias": OPEN_GATE,
                "norm.weight": 1.0,
                "D": 0.0,
                "salience": 0.0,
                "key_offset": 0.0,
                "up.weight": 0.0,
                "conv1d.bias": 0.0,
                "out_proj.bias": 0.0,
                "dt_proj.weight": 0.0,
            }
            value = torch.full(shape, constants[name])
        yield value

    def _uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """torch's default for Linear, with a seed of its own so that the order of writing does not matter."""
        # the names that are drawn in a layer (z, dt, down.weight) differ in length
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.layer * 101 + len(name))
        bound = self.D**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def set_decay(mixer: torch.nn.Module, decay: float) -> bool:
    """Give every head of a mixer `decay` per token, in place; False where a mixer has no parameter for it.

    With a step size, the decay holds at the step the mixer starts with, 1.
    """
    if mixer.config.mixer == "discrete_mamba2":
        if mixer.A_log_bias is None:
            return False
        mixer.A_log_bias.fill_(decay_logit(decay))
    else:
        mixer.A_log.fill_(log_rate(decay))
    return True


def decay_logit(decay: float) -> float:
    """A_log of discrete_mamba2 with sigmoid(-A_log) = decay."""
    if decay == 1:
        return -CERTAIN
    return math.log1p(-decay) - math.log(decay)


def log_rate(decay: float) -> float:
    """A_log of mamba1 and mamba2 with exp(-exp(A_log)) = decay."""
    if decay == 1:
        return -CERTAIN
    return math.log(-math.log(decay))


def fold_out_bias(target: str, own: Source, added: Source) -> Rule:
    """A parallel block sums the mixer and the MLP, so the MLP's last bias can carry the attention's exactly."""
    return Rule(
        target,
        own.shape,
        "derived",
        (*own.names, *added.names),
        lambda c: iter([own.read(c).float() + added.read(c).float()]),
    )
