"""Decide what every layer holds: what the user says, a published preset, or what scores find within a cache budget."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from ..hybrids.shapes import tensor_shapes
from ..layout.placement import Attention, Decision, Placement, Undecided, everywhere
from ..layout.presets import evenly_of, query_heads, uniform_attention_layers, whole_groups
from ..resolve import Resolved
from .budget import Budget, KVHead

if TYPE_CHECKING:  # computing scores needs transformers' models, which a dry run does not import
    from ..fit.aligner import Aligner

RANK_SHARE, MEAN_RANK = 0.015, 32
"""Share of the teacher's weights that output maps may add, and their highest mean rank."""


def decide_placement(budget: Budget, aligner: "Aligner | None" = None) -> Decision:
    """Decide what every layer holds.

    Args:
        aligner: fits the layers that are scored, and has the text. Without one (a dry run, or no alignment) layers and
            heads that scores would choose are placed evenly: their number and bytes are the same in the same bits.

    Raises:
        ValueError: layers or heads that the teacher does not have, or nothing that keeps within the cache.
    """
    resolved = budget.resolved
    num_layers = budget.shape[0]
    if resolved.choice == "teacher":
        return Decision(everywhere(Attention(), num_layers, resolved.bits), notes=(resolved.reasons["choice"],))
    if resolved.choice == "budget":
        decision = _by_budget(budget, aligner)
    elif resolved.choice == "name":
        decision = Decision(_keeping(resolved.layers, resolved, num_layers))
    else:
        decision = _by_share(budget, aligner)
    if resolved.choice != "budget" and resolved.num_heads is not None and decision.placement.replaced_layers:
        decision = _with_heads(decision, budget, aligner)
    placement = with_mean_rank(decision.placement, budget.weights.config, resolved)
    is_open = aligner is None and placement.replaced_layers
    return Decision(placement, decision.undecided if is_open else ())


def _by_budget(budget: Budget, aligner: "Aligner | None") -> Decision:
    """Choose layers, heads, windows and bits together."""
    undecided: tuple[Undecided, ...] = ()
    ranked: list[KVHead] = []
    if budget.resolved.num_heads != 0:
        ranked = _ranked(budget, aligner)
        undecided = ("heads",)
    ranked = [pair for pair in ranked if pair not in budget.given_heads]
    placements = _worth_comparing(budget.placements(ranked), budget)
    placement = placements[0]
    if not budget.resolved.has_state or placement.hybrid is None:
        return Decision(placement, undecided)
    if budget.resolved.window is None:
        undecided = (*undecided, "windows")
    if len(placements) > 1:
        undecided = (*undecided, "bits")
    narrower = budget.with_fewer_planes(placement)
    if narrower is not None and budget.resolved.window is None:
        undecided = (*undecided, "planes")
        placements += _worth_comparing(narrower.placements(ranked), narrower)
    if aligner is not None and {"windows", "bits", "planes"}.intersection(undecided):
        placement = _of_least_error(placements, budget, aligner)
    return Decision(placement, undecided)


def _worth_comparing(placements: list[Placement], budget: Budget) -> list[Placement]:
    """Return the placements of which any may be the best.

    That is the one in most bits if every layer can keep all of its attention. Otherwise more bits than usual are left
    out unless layers keep all of theirs, where rounding is the only error.
    """
    if all_kept := [placement for placement in placements if placement.hybrid is None]:
        return [max(all_kept, key=lambda placement: placement.bits.full)]
    usual, *others = placements
    compared = [usual]
    for placement in others:
        whole_layers = set(placement.attention_layers).difference(budget.resolved.bounded)
        has_fewer_bits = placement.bits.full < usual.bits.full
        if whole_layers or (placement.full_heads and has_fewer_bits):
            compared.append(placement)
    return compared


def _by_share(budget: Budget, aligner: "Aligner | None") -> Decision:
    """Keep the attention of a share of the layers, or of as many as the cache has room for."""
    resolved = budget.resolved
    num_layers = budget.shape[0]
    own = resolved.bounded if resolved.has_windows else ()
    free = [layer for layer in range(num_layers) if layer not in own]
    if resolved.share is None:
        count = budget.layers_within(resolved.replacement, free)
    else:
        count = len(uniform_attention_layers(len(free), resolved.share))
    scored = resolved.alignment.method != "none" and 0 < count < len(free)
    if not scored or aligner is None:
        return Decision(_keeping(evenly_of(free, count), resolved, num_layers), ("layers",) if scored else ())
    from .layer_costs import costliest_layers

    return Decision(_keeping(costliest_layers(aligner, count), resolved, num_layers))


def _keeping(kept: Sequence[int], resolved: Resolved, num_layers: int) -> Placement:
    """Replace all other layers; beside windows the teacher's own stay."""
    own = resolved.bounded if resolved.has_windows else ()
    return everywhere(resolved.replacement, num_layers, resolved.bits).keeping({*kept, *own})


def _with_heads(decision: Decision, budget: Budget, aligner: "Aligner | None") -> Decision:
    """Keep heads in layers with a window: those that are named, or as many as asked for."""
    placement = decision.placement
    heads = budget.resolved.heads
    count = budget.resolved.num_heads
    undecided = decision.undecided
    if heads is None:
        free = [pair for pair in _ranked(budget, aligner) if pair[0] in placement.replaced_layers]
        if count > len(free):
            raise ValueError(
                f"attention_heads asks for {count} key/value heads; the replaced layers have {len(free)}."
            )
        heads = query_heads(free[:count], budget.shared)
        undecided = (*undecided, "heads")
    placement = placement.with_full_heads(whole_groups(heads, budget.shared))
    every = budget.weights.config.num_attention_heads
    # with every head kept nothing is replaced, and the layer stays the teacher's
    all_kept = [i for i, of in placement.full_heads.items() if len(of) == every]
    return Decision(placement.keeping(all_kept), undecided)


def with_mean_rank(placement: Placement, config: PreTrainedConfig, resolved: Resolved) -> Placement:
    """Give layers with a state output maps of one rank: as asked, or what RANK_SHARE of the teacher's weights allows,
    MEAN_RANK at most.

    Args:
        config: the configuration of the hybrid with every layer kept as attention.
    """
    if placement.hybrid is None or not placement.hybrid.state:
        return placement
    rank = resolved.rank
    if rank is None:
        of_a_rank = sum(placement.weights_of_a_rank(config).values())
        parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
        rank = min(int(RANK_SHARE * parameters / of_a_rank), MEAN_RANK)
    return placement.with_ranks(dict.fromkeys(placement.windows, rank))


def _of_least_error(placements: list[Placement], budget: Budget, aligner: "Aligner") -> Placement:
    """Return the placement whose layers have the least sum of errors, once layers with a larger error have a wider
    window, within the same total.

    Errors of hybrid layers are those before a fit, which reduces them; those of rounding, which stay, count more.
    """
    from .layer_costs import errors_at, layer_errors, spread_windows

    aligner.report["layer_errors"] = report = []
    found = []
    for placement, errors in zip(placements, layer_errors(aligner, placements), strict=True):
        if budget.resolved.window is None and placement.windows:
            heads = budget.windowed_heads(placement)
            columns = budget.columns(placement)
            of_windows = {layer: errors[layer] for layer in placement.windows}
            windows = spread_windows(columns, of_windows, heads, budget.longest_window, budget.block)
            errors |= errors_at(windows, of_windows, placement.windows)
            placement = placement.with_windows(windows)
        shown = {layer: float(f"{error:.4g}") for layer, error in errors.items()}
        entry = {"windows": placement.windows, "planes": placement.hybrid and placement.hybrid.planes, "errors": shown}
        report.append(placement.bits.config_fields() | entry)
        found.append((sum(errors.values()), placement))
    return min(found, key=lambda pair: pair[0])[1]


def _ranked(budget: Budget, aligner: "Aligner | None") -> list[KVHead]:
    """Key/value heads, the one to keep first in front; without an aligner, evenly spread over the layers.

    A head counts by how much it serves recall, and by how much its layer's error falls if it is kept.
    """
    if aligner is None:
        return budget.every_head
    from .layer_costs import LOOKING_UP, head_gains
    from .retrieval import ranked_heads, retrieval_scores

    scores = retrieval_scores(aligner.model, aligner.ids, budget.resolved.seed, aligner.progress)
    aligner.report["retrieval_scores"] = [[round(score, 4) for score in of_layer] for of_layer in scores.tolist()]
    gains = head_gains(aligner, budget.windows_alone(), budget.shared)
    aligner.report["head_gains"] = [[round(gain, 4) for gain in of_layer] for of_layer in gains.tolist()]
    return ranked_heads(LOOKING_UP * scores + gains.repeat_interleave(budget.shared, dim=1), budget.shared)
