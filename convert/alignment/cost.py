"""What aligning will cost on this machine, said before any of it is done: seconds, and memory.

Operations are counted from shapes, and how fast this machine does them is measured in a fraction of a second; of a
mixer, one pass is.

Letters: T tokens, L tokens per sequence, W window, M width of the model, A = H D width of all heads, E features.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from modeling_llamba.hybrid_mixer import make_mixer

from ..options import ConversionOptions, parse_size
from ..plan import Cost, Plan
from ..weights.students import tensor_shapes
from .closed_form import BATCH_SEQUENCES, DECAY_SEQUENCES, REFINE_SEQUENCES, candidate_decays, default_steps
from .probes import PROBE_LENGTH, PROSE_SEQUENCES, ROUNDS
from .read_fit import QUERIES, RIDGES, SALIENCE_SEQUENCES
from .teacher_model import usable_device

PASSES = 6
"""Passes over a matrix of scores: mask, maximum, exponential, sum, logarithm, weights."""
OVERHEAD = 1.3
"""What small operations, reading and writing add; measured on SmolLM2."""
GRADIENTS = 3.0
"""What a pass with gradients takes of one without."""


class Rates(NamedTuple):
    """What a machine does in a second: operations of matrix products in float32 and float64, and exponentials."""

    single: float
    double: float
    elements: float


def alignment_cost(plan: Plan, options: ConversionOptions) -> Cost | None:
    """What a closed-form fit costs on this machine; None where none is made, for MOHAWK and the student's stream."""
    hybrid, replaced = plan.placement.hybrid, plan.placement.replaced_layers
    closed_form = options.alignment.method == "closed-form" and options.alignment.fit.stream == "teacher"
    if not closed_form or not replaced or (hybrid is not None and not hybrid.state):
        return None
    device = usable_device(options.alignment.device)
    rates = measured_rates(device, plan.config.hidden_size)
    if hybrid is not None and hybrid.read == "normalised":
        return cost_of(plan, options, rates, resident_bytes())
    mixer = make_mixer(plan.config, replaced[0]).to(device)
    u = torch.rand(BATCH_SEQUENCES, options.sequence_length, plan.config.hidden_size, device=device)
    rotary = tuple(torch.rand(1, u.shape[1], plan.config.head_dim, device=device) for _ in range(2))
    with torch.no_grad():
        mixer(u[:1, :16], tuple(part[:, :16] for part in rotary))
        a_pass = _seconds(lambda: mixer(u, rotary), device)
    return cost_of_mixers(plan, options, rates, mixer, a_pass, resident_bytes())


def cost_of_mixers(
    plan: Plan, options: ConversionOptions, rates: Rates, mixer: nn.Module, a_pass: float, resident: int
) -> Cost:
    """What fitting mixers costs, and scores where they choose the layers.

    Args:
        a_pass: seconds that one of them takes for BATCH_SEQUENCES sequences.
    """
    config, settings, L = plan.config, options.alignment.fit, options.sequence_length
    held, M, E = options.alignment.held_out_sequences, config.hidden_size, mixer.out_proj.in_features
    sequences, block = options.alignment.tokens // L, met_by_a_token(plan.weights.config)
    fitting, T, H = sequences - held, sequences * L, config.num_attention_heads
    decays, ridges = len(candidate_decays(mixer, settings)), len(settings.ridges)
    steps = (
        default_steps(plan.placement.hybrid is not None) if settings.refine_steps is None else settings.refine_steps
    )

    def solution(sequences: int) -> float:
        products = 2 * sequences * L * E * (E + M) + ridges * (E**3 / 3 + 2 * E**2 * M + 2 * held * L * E * M)
        return (sequences + held) / BATCH_SEQUENCES * a_pass + products / rates.double

    streaming = T * ((2 * block + 2 * L * H * config.head_dim) / rates.single + PASSES * H * L / 2 / rates.elements)
    solving = solution(fitting) + (decays > 1) * decays * solution(min(fitting, DECAY_SEQUENCES))
    refining = steps * GRADIENTS * a_pass * REFINE_SEQUENCES / BATCH_SEQUENCES + (steps > 0) * solution(fitting)
    layers, fitted = config.num_hidden_layers, len(plan.placement.replaced_layers)
    seconds = layers * streaming + fitted * refining + (layers if options.scores_placement else fitted) * solving
    nbytes = 4 * (2 * block + config.vocab_size * M)  # of the teacher, a block at a time
    if options.scores_placement:
        prose = PROSE_SEQUENCES * L
        run = 2 * prose + 6 * PROBE_LENGTH
        head = prose * (4 * M * config.vocab_size / rates.single + PASSES * config.vocab_size / rates.elements)
        scored = sum(layers - round(fitted * turn / ROUNDS) for turn in range(ROUNDS))
        seconds += layers * streaming + scored * (layers / 2 * run / T * streaming + head)
        nbytes += 4 * layers * (block + run * M + sum(part.numel() for part in mixer.parameters()))
    at_a_time = 4 * BATCH_SEQUENCES * L * 12 * E + 36 * E**2
    activations = min(8 * T * M, parse_size(options.alignment.activation_memory))
    return Cost(OVERHEAD * seconds, resident + nbytes + activations + at_a_time)


def cost_of(plan: Plan, options: ConversionOptions, rates: Rates, resident: int) -> Cost:
    """What fitting the normalised read costs on a machine of these rates, in a process that takes so much memory."""
    config, L = plan.config, options.sequence_length
    T, behind = options.alignment.tokens // L * L, SALIENCE_SEQUENCES * L
    layers, fitted, M = config.num_hidden_layers, config.layer_types.count("hybrid"), config.hidden_size
    H, K, D, W = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hybrid_window
    A, E, mass, block = H * D, 3 * H * D, 2 + D, met_by_a_token(plan.weights.config)
    streaming = T * (2 * block + 2 * L * A)
    reading = T * (2 * M * (A + 2 * K * D) + A * (8 * W + 4 * D) + L * A + 2 * H * mass**2)
    solving = 2 * T * E * (E + 2 * M)
    salience = behind * (L * A + 2 * M * (A + 2 * K * D))
    double = len(RIDGES) * (E**3 / 3 + 2 * E**2 * M) + 4 * behind * M**2
    scores = PASSES * H * (T * (L / 2 + 2 * W) + behind * L / 2)
    of_layer = (reading + solving + salience) / rates.single + double / rates.double + scores / rates.elements
    seconds = OVERHEAD * (layers * streaming / rates.single + fitted * of_layer)
    activations = min(8 * T * M, parse_size(options.alignment.activation_memory))
    kept = 4 * T * (3 * A + 2 * K * D + M)
    at_a_time = 4 * BATCH_SEQUENCES * L * (12 * A + 3 * QUERIES * H)
    teacher = 4 * (2 * block + config.vocab_size * M)
    return Cost(seconds, resident + teacher + activations + kept + at_a_time + 36 * E**2)


def met_by_a_token(config: PreTrainedConfig) -> int:
    """Parameters of a block, a mean, of whose experts as many count as a token meets."""
    experts = getattr(config, "num_experts", None)  # PhiMamba has none
    share = 1.0 if experts is None else config.num_experts_per_tok / experts
    counts = (
        math.prod(shape) * (share if ".experts." in name else 1)
        for name, shape in tensor_shapes(config).items()
        if name.startswith("model.layers.")
    )
    return round(sum(counts) / config.num_hidden_layers)


def measured_rates(device: torch.device, width: int) -> Rates:
    """What this machine does in a second, the best of three."""
    a, b = (torch.rand(512, width, device=device) for _ in range(2))
    many, products = torch.rand(2**20, device=device), 2 * 512 * 512 * width
    single = products / _seconds(lambda: a @ b.mT, device)
    a, b = a.double(), b.double()
    return Rates(single, products / _seconds(lambda: a @ b.mT, device), len(many) / _seconds(many.exp, device))


def _seconds(what: Callable[[], torch.Tensor], device: torch.device) -> float:
    best = math.inf
    for _ in range(3):
        started = time.perf_counter()
        what()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def resident_bytes() -> int:
    """Memory that this process has taken at most so far; 0 on Windows, which does not say."""
    if sys.platform == "win32":
        return 0
    import resource  # which there is not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
