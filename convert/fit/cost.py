"""Estimate of the seconds and the memory that aligning will take on this machine, made beforehand.

For layers with a window and a state, the default. Operations are counted from shapes, and how fast
this machine does them is measured in less than a second.

Shapes: L length, D model width, H heads, K key/value heads, P head dim, N state, X features.
"""

import functools
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from modeling_llamba.model.config_values import RECURRENT

from ..hybrids.shapes import tensor_shapes
from ..options import parse_size
from ..plan import Cost, Plan
from .hybrid_fit import GRAM_BLOCKS, RIDGES, SALIENCE_SEQUENCES
from .layer_data import Pieces
from .teacher_model import usable_device

PASSES = 6
"""Passes over a matrix of scores: mask, maximum, exponential, sum, logarithm, weights."""
OVERHEAD = 2.0
"""Factor by which small operations, reading and writing exceed matrix products in cache; measured on SmolLM2."""
ROWS, MEASURED_FOR = 2048, 0.3
"""Rows of the matrices that are multiplied to see how fast this machine is, and seconds for which that is repeated.
Beside another process products of 512 rows take ten times as long, but a fit, whose own are large, only twice."""


class Rates(NamedTuple):
    """Rates of a machine per second: operations of matrix products in float32 and float64, and exponentials."""

    single: float
    double: float
    elements: float


def alignment_cost(plan: Plan) -> Cost | None:
    """Estimate a closed-form fit of layers with a state on this machine; None for any other alignment."""
    hybrid = plan.placement.hybrid
    alignment = plan.resolved.alignment
    if alignment.method != "closed-form" or hybrid is None or not hybrid.state:
        return None
    device = usable_device(alignment.device)
    cost = cost_of(plan, measured_rates(device, plan.config.hidden_size), resident_bytes())
    if device.type != "cuda":
        return cost
    L, window = plan.resolved.sequence_length, round(statistics.mean(plan.placement.windows.values()))
    held_out = alignment.held_out_sequences
    return cost._replace(nbytes=device_bytes(plan.config, alignment.tokens // L - held_out, held_out, L, window))


def device_bytes(config: PreTrainedConfig, fitting: int, judging: int, L: int, window: int) -> int:
    """Estimate the peak bytes of a device on which a hybrid layer is fitted, everything kept that can be.

    The largest of three moments: scores of the last of the sequences that the mass is fitted on; the first product of
    features, while all of these are kept; the solution. Bytes for a number, or numbers at a time, are those that the
    stand-in device counted (tests/device/test_memory.py).

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
    for_mass = -(-batches // 2) * batch
    block = sum(math.prod(s) for name, s in tensor_shapes(config).items() if name.startswith("model.layers.0."))
    attention = 2 * D * (inner + K * P)
    projected = 2 * D + inner + 2 * K * P
    of_token = projected + behind * 2 * (inner + K * P)
    always = 4 * (block + attention + judged * projected)
    scores = of_token * for_mass + 3.5 * batch * pieces.queries * H
    product = of_token * (for_mass - batch) + 5 * X**2 + 10 * batch * inner
    solution = judged * behind * (X + D) + 10 * X**2 + 4 * X * D
    return round(always + 4 * max(scores, product, solution))


def cost_of(plan: Plan, rates: Rates, resident: int) -> Cost:
    """Estimate seconds and peak bytes from measured rates and from the memory that the process takes already."""
    config = plan.config
    alignment = plan.resolved.alignment
    L = plan.resolved.sequence_length
    tokens = alignment.tokens // L * L
    behind = SALIENCE_SEQUENCES * L
    layers = config.num_hidden_layers
    fitted = config.layer_types.count("hybrid")
    D = config.hidden_size
    H, K, P = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    window = statistics.mean(plan.placement.windows.values())
    inner = H * P
    X = 3 * inner
    N = config.state_keys(layers - 1)
    block = active_parameters(plan.weights.config)
    mass = 2 + N - config.state_planes(layers - 1) + P - config.rotary_planes
    # the teacher's blocks: two operations a parameter, and full attention but where there is a state
    attending = layers - config.layer_types.count(RECURRENT)
    streaming = tokens * (layers * 2 * block + attending * 2 * L * inner)
    # projections, window and readout, true scores behind the window, normal equations of the mass
    reading = tokens * (2 * D * (inner + 2 * K * P) + inner * (8 * window + 4 * N) + L * inner + 2 * H * mass**2)
    # the Gram matrix, blocks above the diagonal left out, and the moments
    solving = 2 * tokens * X * ((GRAM_BLOCKS + 1) / (2 * GRAM_BLOCKS) * X + D)
    salience = behind * (L * inner + 2 * D * (inner + 2 * K * P))
    # for each ridge a factor, a solution and its eigenvectors; the Gram matrix of the salience
    double = len(RIDGES) * (X**3 / 3 + 4 * X**2 * D + 12 * D**3) + 4 * behind * D**2
    scores = PASSES * H * (tokens * (L / 2 + 2 * window) + behind * L / 2)
    of_layer = (reading + solving + salience) / rates.single + double / rates.double + scores / rates.elements
    seconds = OVERHEAD * (streaming / rates.single + fitted * of_layer)
    activations = min(8 * tokens * D, parse_size(alignment.activation_memory))
    kept = 4 * tokens * (3 * inner + 2 * K * P + D)
    # what one batch of sequences takes beside that
    at_a_time = 4 * Pieces().sequences * L * (12 * inner + 3 * Pieces().queries * H)
    teacher = 4 * (2 * block + config.vocab_size * D)
    return Cost(seconds, resident + teacher + activations + kept + at_a_time + 36 * X**2)


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


@functools.cache
def measured_rates(device: torch.device, width: int) -> Rates:
    """Measure the best rates of this machine, once in a process."""
    a, b = (torch.rand(ROWS, width, device=device) for _ in range(2))
    many = torch.rand(2**22, device=device)
    products = 2 * ROWS**2 * width
    single = products / _seconds(lambda: a @ b.mT, device)
    a, b = a.double(), b.double()
    return Rates(single, products / _seconds(lambda: a @ b.mT, device), len(many) / _seconds(many.exp, device))


def _seconds(what: Callable[[], torch.Tensor], device: torch.device) -> float:
    best = math.inf
    begin = time.perf_counter()
    # once at least, however slow the machine is
    while (started := time.perf_counter()) - begin < MEASURED_FOR or math.isinf(best):
        what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def resident_bytes() -> int:
    """Memory that this process has taken at most so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kilobytes by getrusage(2), but bytes on macOS
    return most if sys.platform == "darwin" else 1024 * most
