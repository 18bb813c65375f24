"""Cost of replacing the attention of each layer, and the placement that follows from it.

The error of a hybrid layer differs between layers by a factor of up to 80, and falls as a power of its window's width.
Within a cache budget, the widths that minimise the sum of the errors follow from both. If a share of the layers keeps
its attention, these are the layers that would lose most or that look up distant tokens.

A mixer alone is not exact on the first tokens, to which all later ones attend. There a small error may spoil
everything after it, so the divergence of the whole model is measured (figures: docs/results/log.md).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from modeling_llamba.hybrid.hybrid_attention import HybridAttention
from modeling_llamba.hybrid.readout import theory_mass
from modeling_llamba.hybrid.rounding import WHOLE, Rounding
from modeling_llamba.model.causal_lm import finish_logits
from modeling_llamba.model.rotary import Rotary

from ..fit.activations import ActivationStream
from ..fit.aligner import Aligner
from ..fit.divergence import kl_of_hidden
from ..fit.fit import within_memory
from ..fit.hybrid_fit import fit_salience
from ..fit.key_offset import fit_key_offset, offset_on
from ..fit.layer_data import LayerData, Pieces, held_out_error
from ..fit.probes import Probe, copy_probe, plain_tokens
from ..fit.teacher_model import TeacherModel, replaced
from ..io.writer import Progress
from ..layout.config import hybrid_config, mixer_fields
from ..layout.placement import Hybrid, Mixer, Placement, everywhere
from ..layout.presets import query_heads
from ..options import SALIENT, MixerOptions, PlacementOptions, parse_size
from ..resolve import block_of
from .retrieval import retrieval_scores

ROWS = 4
"""Calibration sequences on which errors are measured."""
POWER = 0.8
"""An error falls as this power of the window's width."""
ROUNDING_WEIGHT = 5
"""Weight of an error of rounding beside one before a fit. No fit reduces it, and it is there from the first token on:
SmolLM2 at 8 % has a KL of 0.0145 with keys in 6 bits (errors of 0.269, and 0.016 of rounding) and of 0.0226 with keys
in 4 (0.157 and 0.075)."""
WINDOW = 32
"""Width of the windows with which layers are compared if a share of them keeps its attention."""
LOOKING_UP = 0.45
"""Weight of retrieval scores beside relative errors: of a layer's mean score in its cost, of a head's in its rank."""
KL_ROWS, ROUNDS = 2, 3
"""Number of sequences on which KL is measured, and of rounds, since the costs of single layers do not add up."""
PROBE_LENGTH, RECALL, LEAST_RECALL = 96, 0.3, 0.2
"""Number of random tokens to copy; weight of the loss on them beside KL; share of them that the teacher must copy
right, or else they do not count."""
STEPS = 16
"""Windows are multiples of the widest over this number, so that not every layer needs kernels of its own."""


@torch.no_grad()
def layer_errors(
    aligner: Aligner, placements: Sequence[Placement], mixer: dict[str, Any] | None = None
) -> list[dict[int, float]]:
    """Return the relative squared errors of layers under each placement before a fit, on held-out rows.

    They are those of hybrid layers and of layers that keep full attention in few bits; those of rounding, which no fit
    reduces, count more. The mass is that of keys that
    are all alike (`theory_mass`), and there is no output map. The error after a fit is roughly in proportion, but
    takes ten times as long to find.

    Args:
        mixer: fields of the mixers' configuration; by default those of the conversion.
    """
    configs = [hybrid_config(aligner.weights, of, mixer or aligner.resolved.mixer) for of in placements]
    memory = parse_size(aligner.resolved.alignment.activation_memory)
    rows = aligner.ids[-ROWS:]
    if not aligner.resolved.has_windows:  # with windows the aligner's rows ask for recall already
        rows = aligner.with_recall(rows)
    errors: list[dict[int, float]] = [{} for _ in placements]
    pieces = Pieces()
    layers = range(aligner.model.num_layers)
    # one half of the rows is for the fit of the salience, the other to measure on
    with contextlib.closing(ActivationStream(aligner.model, rows, len(rows) // 2, memory, aligner.work)) as stream:
        for layer in layers:
            aligner.progress("measuring layers", layer, len(layers))
            data = stream.attention_data(layer)
            for config, of_placement in zip(configs, errors, strict=True):
                if config.layer_types[layer] == "hybrid":
                    aligner.model.follow(config)
                    measured = functools.partial(_error_before_fit, aligner.model.mixer(layer), data)
                elif config.layer_types[layer] == "full_attention" and config.full_attention_bits != WHOLE:
                    roundings = Rounding.of_pair(config.full_attention_bits, config.head_dim)
                    attention = aligner.model.block(layer).attention
                    offset = offset_on(attention, data) if config.key_offsets else None
                    measured = functools.partial(_error_of_rounding, aligner.model, layer, roundings, offset, data)
                else:
                    continue
                of_placement[layer], pieces = within_memory(measured, pieces)
    aligner.progress("measuring layers", len(layers), len(layers))
    return errors


@torch.no_grad()
def head_gains(aligner: Aligner, placement: Placement, shared: int) -> torch.Tensor:
    """Return the gain (layers, heads) of each key/value head: its layer's error less that with the head alone kept.

    Errors are those before a fit, relative and squared, on held-out rows; layers without a window gain nothing.

    Args:
        placement: hybrid layers without kept heads. shared: query heads per key/value head.
    """
    model, resolved = aligner.model, aligner.resolved
    kv_heads = model.config.num_key_value_heads
    gains = torch.zeros(model.num_layers, kv_heads)
    model.follow(hybrid_config(aligner.weights, placement, resolved.mixer))
    configs = []
    for kept in range(kv_heads if kv_heads > 1 else 0):  # a layer with one head keeps all of its attention with it
        heads = query_heads([(layer, kept) for layer in placement.windows], shared)
        configs.append(hybrid_config(aligner.weights, placement.with_full_heads(heads), resolved.mixer))
        configs[-1]._attn_implementation = model.config._attn_implementation
    memory = parse_size(resolved.alignment.activation_memory)
    rows = aligner.ids[-ROWS:]
    pieces = Pieces()
    with contextlib.closing(ActivationStream(model, rows, len(rows) // 2, memory, aligner.work)) as stream:
        for layer in range(model.num_layers):
            aligner.progress("measuring heads, layers", layer, model.num_layers)
            data = stream.attention_data(layer)
            if layer not in placement.windows:
                continue
            mixer = model.mixer(layer)
            others = [_keeping(mixer, config) for config in configs]
            measured = functools.partial(_errors_before_fit, mixer, others, data)
            (alone, *kept), pieces = within_memory(measured, pieces)
            gains[layer] = alone - torch.tensor(kept or [0.0])
    aligner.progress("measuring heads, layers", model.num_layers, model.num_layers)
    return gains


def _keeping(layer: HybridAttention, config: PreTrainedConfig) -> HybridAttention:
    """The layer with other kept heads, before a fit, without an output map; what heads share is the layer's own."""
    with torch.device("meta"):
        other = HybridAttention(config, layer.layer_idx)
    for name, module in layer.named_children():
        setattr(other, name, module)
    other.salience, other.sinks = layer.salience, layer.sinks
    other.down = other.up = None
    if layer.mass is not None:
        other.mass = torch.nn.Parameter(theory_mass(config, layer.layer_idx).to(layer.mass))
    if other.key_offset is not None:
        offset = torch.zeros(
            other.key_offset.shape, dtype=layer.k_proj.weight.dtype, device=layer.k_proj.weight.device
        )
        other.key_offset = torch.nn.Parameter(offset, requires_grad=False)
    return other


def _errors_before_fit(
    layer: HybridAttention, others: Sequence[HybridAttention], data: LayerData, pieces: Pieces
) -> list[float]:
    """Return the held-out errors of a layer and of others that share its tensors, of which only offsets of keys and
    the salience, if any, are fitted."""
    data = dataclasses.replace(data, pieces=pieces)
    for one in (layer, *others):
        fit_key_offset(one, data)
    if layer.salience is not None:
        inputs = (data.batch(rows)[0] for rows in data.in_batches(data.fitting()))
        fit_salience(layer, inputs, data.rotary, pieces.queries)
    return [held_out_error(one, data).item() for one in (layer, *others)]


def _error_before_fit(layer: HybridAttention, data: LayerData, pieces: Pieces) -> float:
    """Return the held-out error of a layer before its fit, in which the rounding of kept heads counts as it stays."""
    (error,) = _errors_before_fit(layer, [], data, pieces)
    rounded = layer.kept_roundings
    if not layer.kept or not any(rounding.rounds for rounding in rounded):
        return error
    try:
        layer.kept_roundings = Rounding.of_pair(WHOLE, layer.head_dim)
        exact = held_out_error(layer, dataclasses.replace(data, pieces=pieces)).item()
    finally:
        layer.kept_roundings = rounded  # also where memory runs out, after which this is tried again
    return exact + max(error - exact, 0.0) * ROUNDING_WEIGHT


def _error_of_rounding(
    teacher: TeacherModel,
    layer: int,
    roundings: tuple[Rounding, Rounding],
    offset: torch.Tensor | None,
    data: LayerData,
    pieces: Pieces,
) -> float:
    """Return the error, as it counts beside those before a fit, of the teacher's attention where keys, less their
    offset, and values are rounded."""
    attention = teacher.block(layer).attention
    exact = attention.roundings

    def attend(u: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        masks = teacher.block_inputs(u)["masks"]
        return attention(u, rotary, masks[teacher.config.layer_types[layer]])[0]

    try:
        attention.roundings, attention.key_offset = roundings, offset
        return held_out_error(attend, dataclasses.replace(data, pieces=pieces)).item() * ROUNDING_WEIGHT
    finally:
        attention.roundings, attention.key_offset = exact, None


def costliest_layers(aligner: Aligner, count: int) -> tuple[int, ...]:
    """Return the `count` layers that cost most to replace; if by a window, of those that have none in the teacher."""
    layers = range(aligner.model.num_layers)
    resolved = aligner.resolved
    if not resolved.has_windows:
        aligner.follow(everywhere(Mixer(), len(layers)))
        fits = aligner.fit(list(layers), dataclasses.replace(resolved.alignment.fit, refine_steps=0))
        mixers = {layer: mixer for layer, (mixer, _) in fits.items()}
        rows = aligner.ids[-KL_ROWS:]
        probe = copy_probe(plain_tokens(aligner.model.config.vocab_size), KL_ROWS, PROBE_LENGTH, resolved.seed)
        gone, costs = cheapest_by_kl(aligner.model, mixers, rows, probe, len(layers) - count, aligner.progress)
        kept = [layer for layer in layers if layer not in gone]
    else:
        quarter = resolved.sequence_length // 4
        window = min(WINDOW, quarter)
        beside = Hybrid(window, block_of(window), PlacementOptions.sinks, salient=min(SALIENT, quarter))
        placement = everywhere(beside, len(layers)).keeping(resolved.bounded)
        (errors,) = layer_errors(aligner, [placement], mixer_fields(aligner.weights.config, MixerOptions()))
        # on text the heads that look up distant tokens seldom show
        scores = retrieval_scores(aligner.model, aligner.ids, resolved.seed, aligner.progress).mean(1).tolist()
        costs = {layer: error + LOOKING_UP * scores[layer] for layer, error in errors.items()}
        kept = sorted(costs, key=lambda layer: (-costs[layer], layer))[:count]
    aligner.report["layer_costs"] = {layer: float(f"{cost:.4g}") for layer, cost in costs.items()}
    return tuple(sorted(kept))


@torch.no_grad()
def cheapest_by_kl(
    teacher: TeacherModel,
    mixers: dict[int, torch.nn.Module],
    ids: torch.Tensor,
    probe: Probe,
    count: int,
    progress: Progress = lambda what, done, total: None,
) -> tuple[set[int], dict[int, float]]:
    """Return the `count` layers whose replacement keeps the model nearest to the teacher, and each layer's cost alone.

    The cost is KL on text plus RECALL times the loss on the probe, both in nats per token. A third of the layers is
    chosen at a time, by their costs in a model in which those chosen before are replaced already.

    Args:
        mixers: a fitted one for every layer. ids: (B, L), text. probe: (B, L') tokens, some of which are to be
            recalled; it does not count if the teacher itself recalls few.
    """
    model = teacher.whole()
    mixers = {layer: mixer.to(teacher.device) for layer, mixer in mixers.items()}
    gone = set()
    alone = {}
    # a token is predicted where the one before it stands
    asked = probe.answers.roll(-1, 1)
    truth = probe.ids[probe.answers].to(teacher.device)

    def run(hidden: torch.Tensor, first: int, layers: set[int]) -> list[torch.Tensor]:
        states = [hidden]
        inputs = teacher.block_inputs(hidden)
        with replaced(model, {layer: mixers[layer] for layer in layers}):
            for block in model.model.layers[first:]:
                states.append(block(states[-1], **inputs))
        return states

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return finish_logits(model.lm_head(hidden), model.config)

    def normed(states: list[torch.Tensor]) -> torch.Tensor:
        return model.model.norm(states[-1])

    parts = teacher.embed(ids), teacher.embed(probe.ids)
    on_text, on_probe = (normed(run(part, 0, gone)) for part in parts)
    recalled = (logits(on_probe[asked]).argmax(-1) == truth).float().mean().item()
    weight = RECALL if recalled >= LEAST_RECALL else 0.0
    for target in sorted({round(count * step / ROUNDS) for step in range(1, ROUNDS + 1)} - {0}):
        before = [run(part, 0, gone) for part in parts]
        costs = {}
        # blocks before the layer are as they were, so only those from it on run again
        for layer in mixers.keys() - gone:
            progress("comparing layers", len(costs), len(mixers) - len(gone))
            text, answers = (normed(run(states[layer], layer, gone | {layer})) for states in before)
            kl = kl_of_hidden(on_text.flatten(0, 1), text.flatten(0, 1), logits).mean().item()
            loss = torch.nn.functional.cross_entropy(logits(answers[asked]).float(), truth).item()
            costs[layer] = kl + weight * loss
        # a layer's cost alone is that of the first round, in which no other layer is replaced
        alone = alone or costs
        progress("comparing layers", len(costs), len(costs))
        gone |= set(sorted(costs, key=lambda layer: (costs[layer], layer))[: target - len(gone)])
    return gone, alone


def errors_at(windows: dict[int, int], errors: dict[int, float], before: dict[int, int]) -> dict[int, float]:
    """Estimate each layer's error with a window of another width from that with the one before."""
    return {layer: error * (windows[layer] / before[layer]) ** -POWER for layer, error in errors.items()}


def spread_windows(
    columns: int, errors: dict[int, float], heads: dict[int, int], longest: int, block: int
) -> dict[int, int]:
    """The width of each layer's window for the least sum of errors, none much below half of the mean.

    Args:
        columns: of all windows together, each counted once for every key/value head that has it.
        errors: of each layer, with windows of one width.
        heads: key/value heads with a window, by layer.
        longest: the widest window that there may be.
        block: what all widths are multiples of.
    """
    mean = columns // sum(heads.values())
    step = max(longest // STEPS // block, 1) * block
    # with narrower ones answers leave the teacher's sooner, and long texts gain nothing
    least = max(min(mean // 2 // step * step, longest), 2 * block)
    windows = dict.fromkeys(errors, least)
    left = columns - least * sum(heads.values())
    while True:
        wider = {}
        for layer, at in windows.items():
            more = min(step, left // heads[layer] // block * block, longest - at)
            if more > 0:
                gain = errors[layer] * (at**-POWER - (at + more) ** -POWER) / (more * heads[layer])
                wider[layer] = gain, more
        if not wider:
            return windows
        # of equal gains the earlier layer's, so that a run can be repeated
        best = max(wider, key=lambda layer: (wider[layer][0], -layer))
        windows[best] += wider[best][1]
        left -= wider[best][1] * heads[best]
