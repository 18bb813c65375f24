"""Estimate of the memory that aligning will take at its peak, from shapes alone.

For layers with a window and a state, the default.

Shapes: L length, D model width, H heads, K key/value heads, P head dim, X features.
"""

import math
import resource
import statistics
import sys

from transformers import PreTrainedConfig

from ..hybrids.shapes import tensor_shapes
from ..options import parse_size
from ..plan import Plan
from .layer_data import Pieces
from .mass_fit import MASS_TOKENS
from .teacher_model import usable_device


def alignment_bytes(plan: Plan) -> int | None:
    """Estimate the bytes of the process, or of its device, for a closed-form fit of layers with a state; None for any
    other alignment."""
    hybrid = plan.placement.hybrid
    alignment = plan.resolved.alignment
    if alignment.method != "closed-form" or hybrid is None or not hybrid.state:
        return None
    if usable_device(alignment.device).type != "cuda":
        return host_bytes(plan, resident_bytes())
    L, window = plan.resolved.sequence_length, round(statistics.mean(plan.placement.windows.values()))
    held_out = alignment.held_out_sequences
    return device_bytes(plan.config, alignment.tokens // L - held_out, held_out, L, window)


def device_bytes(config: PreTrainedConfig, fitting: int, judging: int, L: int, window: int) -> int:
    """Estimate the peak bytes of a device on which a hybrid layer is fitted, everything kept that can be.

    The largest of four moments: scores of the last of the sequences that the mass is fitted on; the regression of
    the mass; the first product of features, while all of these are kept; the solution. Bytes for a number, or numbers
    at a time, are those that the stand-in device counted (tests/device/test_memory.py).

    Args:
        fitting, judging: numbers of sequences of L tokens. window: its width in tokens.
    """
    D, H, K, P = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    inner = H * P
    X = 3 * inner
    behind = (L - window) / L
    pieces = Pieces()
    batch, judged = pieces.sequences * L, judging * L
    batches = -(-fitting // pieces.sequences)
    for_mass = min(-(-batches // 2), max(MASS_TOKENS // batch, 1)) * batch
    block = sum(math.prod(s) for name, s in tensor_shapes(config).items() if name.startswith("model.layers.0."))
    attention = 2 * D * (inner + K * P)
    projected = 2 * D + inner + 2 * K * P
    of_token = projected + behind * 2 * (inner + K * P)
    always = 4 * (block + attention + judged * projected)
    # as in `theory_mass`
    of_mass = H * (2 + config.state_keys(0) - config.state_planes(0) + P - config.rotary_planes)
    of_gates = of_mass + 10 * H  # and five numbers in float64
    waiting = (of_token + behind * of_gates) * for_mass
    scores = waiting + 3.5 * batch * pieces.queries * H + 2 * batch * inner
    regression = waiting + 4 * behind * batch * of_mass
    product = of_token * (for_mass - batch) + 5 * X**2 + 10 * batch * inner
    solution = judged * behind * (X + D) + 10 * X**2 + 4 * X * D
    return round(always + 4 * max(scores, regression, product, solution))


def host_bytes(plan: Plan, resident: int) -> int:
    """Estimate the peak bytes of this process, which has taken `resident` already."""
    config = plan.config
    alignment = plan.resolved.alignment
    L = plan.resolved.sequence_length
    tokens = alignment.tokens // L * L
    D = config.hidden_size
    H, K, P = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    inner = H * P
    X = 3 * inner
    block = active_parameters(plan.weights.config)
    activations = min(8 * tokens * D, parse_size(alignment.activation_memory))
    kept = 4 * tokens * (3 * inner + 2 * K * P + D)
    # what one batch of sequences takes beside that
    at_a_time = 4 * Pieces().sequences * L * (12 * inner + 3 * Pieces().queries * H)
    teacher = 4 * (2 * block + config.vocab_size * D)
    return resident + teacher + activations + kept + at_a_time + 36 * X**2


def active_parameters(config: PreTrainedConfig) -> int:
    """Return the mean number of parameters of a block; of its experts only those active for a token count."""
    experts = getattr(config, "num_experts", None)  # PhiMamba has none
    share = 1.0 if experts is None else config.num_experts_per_tok / experts
    counts = (
        math.prod(shape) * (share if ".experts." in name else 1)
        for name, shape in tensor_shapes(config).items()
        if name.startswith("model.layers.")
    )
    return round(sum(counts) / config.num_hidden_layers)


def resident_bytes() -> int:
    """Memory that this process has taken at most so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kilobytes by getrusage(2), but bytes on macOS
    return most if sys.platform == "darwin" else 1024 * most
