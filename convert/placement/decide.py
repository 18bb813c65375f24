"""Decide what every layer holds: what the user says, a published preset, or what scores find within a cache budget."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..options import ConversionOptions
from ..plan import TeacherWeights
from ..weights.students import tensor_shapes
from .budget import Budget, KVHead, hybrid_layer, refuse_heads_of
from .placement import Attention, Decision, Hybrid, Layer, Mixer, Placement, Undecided, everywhere
from .presets import (  # fmt: skip
    attention_layers,
    counted_heads,
    evenly_of,
    kept_heads,
    query_heads,
    uniform_attention_layers,
    whole_groups,
)

if TYPE_CHECKING:  # what takes scores imports transformers' models, which takes seconds, and a dry run takes none
    from ..alignment.aligner import Aligner

RANK_SHARE, MEAN_RANK = 0.015, 32
"""Share of the teacher's weights that output maps may add, and their highest mean rank."""


def options_for_teacher(options: ConversionOptions, weights: TeacherWeights) -> ConversionOptions:
    """The options, unless they ask for windows where the teacher has its own.

    Raises:
        ValueError: every layer of the teacher has a window, and something narrower is asked for.
    """
    asked = options.placement.window, options.placement.attention_heads, options.placement.cache
    if _has_windows_alone(weights, options) and options.has_windows and asked != (None,) * 3:
        raise ValueError(
            f"Every layer of this teacher has a window of {weights.config.sliding_window} tokens, so its cache is of "
            "constant size already; leave out window, attention_heads and cache, or replace layers by mixers "
            "(attention_layers: 0.5)."
        )
    return options


def _has_windows_alone(weights: TeacherWeights, options: ConversionOptions) -> bool:
    """Return True if every layer of the teacher has a window narrower than the context."""
    return len(weights.windows(options.placement.context)) == weights.config.num_hidden_layers


def decide_placement(budget: Budget, aligner: "Aligner | None" = None) -> Decision:
    """Decide what every layer holds.

    Args:
        aligner: fits the mixers that are scored, and has the text. Without one (a dry run, or no alignment) layers and
            heads that scores would choose are placed evenly: their number and bytes are the same.

    Raises:
        ValueError: layers or heads that the teacher does not have, or nothing that keeps within the cache.
    """
    weights, options = budget.weights, budget.options
    if options.has_windows and _has_windows_alone(weights, options):
        note = f"every layer has a window of {weights.config.sliding_window} tokens in the teacher and keeps it"
        return Decision(everywhere(Attention(), budget.shape[0]), notes=(note,))
    if options.searches_budget:
        decision = _by_budget(budget, aligner)
    else:
        decision = _by_name(budget) if options.names_layers else _by_share(budget, aligner)
        if options.placement.attention_heads is not None and decision.placement.replaced_layers:
            decision = _with_heads(decision, budget, aligner)
    placement = with_mean_rank(decision.placement, weights, options)
    is_open = aligner is None and placement.replaced_layers
    return Decision(placement, decision.undecided if is_open else ())


def _by_budget(budget: Budget, aligner: "Aligner | None") -> Decision:
    """Choose layers, heads and windows together."""
    undecided: tuple[Undecided, ...] = ()
    ranked: list[KVHead] = []
    if budget.asked_heads != 0:
        ranked = _ranked(budget, aligner)
        undecided = ("heads",)
    placement = budget.placement([pair for pair in ranked if pair not in budget.given_heads])
    fitted = placement.hybrid is not None and placement.hybrid.state
    if fitted and budget.options.placement.window is None:
        undecided = (*undecided, "windows")
        if aligner is not None:
            placement = _spread(placement, budget, aligner)
    return Decision(placement, undecided)


def _by_name(budget: Budget) -> Decision:
    """Keep the attention of the layers that are named, and of those with a window of their own beside windows."""
    kept = attention_layers(budget.shape[0], budget.options.placement.attention_layers)
    return Decision(_keeping(kept, budget))


def _by_share(budget: Budget, aligner: "Aligner | None") -> Decision:
    """Keep the attention of a share of the layers: as asked, as the cache has room for, or half."""
    options, replacement = budget.options, replaced_layer(budget.options)
    own = budget.windows if isinstance(replacement, Hybrid) else ()
    free = [layer for layer in range(budget.shape[0]) if layer not in own]
    if options.cache is not None:
        count = budget.layers_within(replacement, free)
    else:
        asked = options.placement.attention_layers
        count = len(uniform_attention_layers(len(free), 0.5 if asked is None else asked))
    scored = options.alignment.method != "none" and 0 < count < len(free)
    if not scored or aligner is None:
        return Decision(_keeping(evenly_of(free, count), budget), ("layers",) if scored else ())
    from .layer_costs import costliest_layers

    return Decision(_keeping(costliest_layers(aligner, replacement, own, count), budget))


def _keeping(kept: Sequence[int], budget: Budget) -> Placement:
    """Replace all other layers; beside windows the teacher's own stay."""
    replacement = replaced_layer(budget.options)
    own = budget.windows if isinstance(replacement, Hybrid) else ()
    return everywhere(replacement, budget.shape[0]).keeping({*kept, *own})


def _with_heads(decision: Decision, budget: Budget, aligner: "Aligner | None") -> Decision:
    """Keep heads in layers with a window: those that are named, or as many as asked for."""
    placement, asked, config = decision.placement, budget.options.placement.attention_heads, budget.weights.config
    undecided = decision.undecided
    heads = kept_heads(asked, budget.shape[0], config.num_attention_heads)
    if heads is None:
        free = [pair for pair in _ranked(budget, aligner) if pair[0] in placement.replaced_layers]
        count = counted_heads(asked, budget.shape[0] * budget.shape[1])
        if count > len(free):
            raise ValueError(
                f"attention_heads {asked} is {count} key/value heads; the replaced layers have {len(free)}."
            )
        heads = query_heads(free[:count], budget.shared)
        undecided = (*undecided, "heads")
    refuse_heads_of(budget.windows, heads)
    placement = placement.with_full_heads(whole_groups(heads, budget.shared))
    all_kept = [i for i, of in placement.full_heads.items() if len(of) == config.num_attention_heads]
    return Decision(placement.keeping(all_kept), undecided)


def with_mean_rank(placement: Placement, weights: TeacherWeights, options: ConversionOptions) -> Placement:
    """Give layers with a state output maps of one rank: as asked, or what RANK_SHARE of the teacher's weights allows,
    MEAN_RANK at most; by default none where nothing is fitted."""
    if placement.hybrid is None or not placement.hybrid.state:
        return placement
    rank, layers = options.placement.rank, placement.windows
    if rank is None and options.alignment.method == "none":
        return placement
    if rank is None:
        config = weights.config
        width, heads = config.head_dim, config.num_attention_heads
        of_a_rank = sum(
            3 * width * (heads - len(placement.full_heads.get(i, ()))) + config.hidden_size for i in layers
        )
        parameters = sum(math.prod(shape) for shape in tensor_shapes(config).values())
        rank = min(int(RANK_SHARE * parameters / of_a_rank), MEAN_RANK)
    return placement.with_ranks(dict.fromkeys(layers, rank))


def replaced_layer(options: ConversionOptions) -> Layer:
    """Choose what replaces a layer's attention: a mixer, or a window."""
    window = options.placement.window
    return Mixer() if window is None else hybrid_layer(options, window)


def _spread(placement: Placement, budget: Budget, aligner: "Aligner") -> Placement:
    """Distribute the width of the windows by what each layer gets wrong."""
    from .layer_costs import layer_errors, spread_windows

    errors = layer_errors(aligner, placement)
    aligner.report["window_errors"] = {layer: float(f"{error:.4g}") for layer, error in errors.items()}
    heads = budget.windowed_heads(placement)
    columns = budget.columns(placement)
    return placement.with_windows(spread_windows(columns, errors, heads, budget.longest_window, budget.block))


def _ranked(budget: Budget, aligner: "Aligner | None") -> list[KVHead]:
    """Key/value heads, those that serve recall most first; without an aligner, evenly spread over the layers."""
    if aligner is None:
        layers, kv_heads = budget.shape
        return [(layer, kv) for kv in range(kv_heads) for layer in range(layers)]
    from .retrieval import ranked_heads, retrieval_scores

    scores = retrieval_scores(aligner.model, aligner.ids, aligner.options.seed, aligner.progress)
    aligner.report["retrieval_scores"] = [[round(score, 4) for score in of_layer] for of_layer in scores.tolist()]
    return ranked_heads(scores, budget.shared)
