"""Decide what every layer holds: what the user says, a published preset, or what scores find within a cache budget."""

import math
from typing import TYPE_CHECKING

from ..options import ConversionOptions
from ..plan import TeacherWeights
from ..weights.students import tensor_shapes
from .budget import Budget, KVHead, hybrid_layer, num_layers_within, refuse_heads_of
from .placement import Attention, Decision, Hybrid, Layer, Mixer, Placement, everywhere
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
STAND_INS = "which {} keep their attention is decided by scores during the run; those shown are as many, evenly placed"


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


def decide_placement(
    weights: TeacherWeights, options: ConversionOptions, aligner: "Aligner | None" = None
) -> Decision:
    """Decide what every layer holds.

    Args:
        aligner: fits the mixers that are scored, and has the text. Without one (a dry run, or no alignment) layers and
            heads that scores would choose are placed evenly: their number and bytes are the same.

    Raises:
        ValueError: layers or heads that the teacher does not have, or nothing that keeps within the cache.
    """
    num_layers, asked_heads = weights.config.num_hidden_layers, options.placement.attention_heads
    aligned = options.alignment.method != "none"
    if options.has_windows and _has_windows_alone(weights, options):
        note = f"every layer has a window of {weights.config.sliding_window} tokens in the teacher and keeps it"
        return Decision(everywhere(Attention(), num_layers), notes=(note,))
    if options.searches_budget:
        budget, notes = Budget(weights, options), []
        ranked = [] if budget.asked_heads == 0 else _ranked(weights, aligner, notes)
        placement = budget.placement([pair for pair in ranked if pair not in budget.given_heads])
        fitted = placement.hybrid is not None and placement.hybrid.state
        if fitted and options.placement.window is None:
            placement = _spread(placement, budget, aligner, notes)
        placement = with_mean_rank(placement, weights, options)
        return Decision(placement, tuple(notes) if placement.replaced_layers else ())
    replacement, notes = replaced_layer(options), []
    own = Budget(weights, options).windows if isinstance(replacement, Hybrid) else ()
    if options.names_layers:
        kept = attention_layers(num_layers, options.placement.attention_layers)
    else:
        free = [layer for layer in range(num_layers) if layer not in own]
        count = _number_kept(weights, options, replacement, free)
        kept = evenly_of(free, count)
        if aligned and 0 < count < len(free):
            if aligner is None:
                notes.append(STAND_INS.format("layers"))
            else:
                from .layer_costs import costliest_layers

                kept = costliest_layers(aligner, replacement, count)
    placement = everywhere(replacement, num_layers).keeping({*kept, *own})
    if asked_heads is not None and placement.replaced_layers:
        heads = kept_heads(asked_heads, num_layers, weights.config.num_attention_heads)
        if heads is None:
            free = [pair for pair in _ranked(weights, aligner, notes) if pair[0] in placement.replaced_layers]
            count = counted_heads(asked_heads, num_layers * weights.config.num_key_value_heads)
            if count > len(free):
                raise ValueError(
                    f"attention_heads {asked_heads} is {count} key/value heads; the replaced layers have {len(free)}."
                )
            heads = query_heads(free[:count], Budget(weights, options).shared)
        refuse_heads_of(own, heads)
        heads = whole_groups(heads, Budget(weights, options).shared)
        placement = placement.with_full_heads(heads)
        all_kept = [i for i, of in placement.full_heads.items() if len(of) == weights.config.num_attention_heads]
        placement = placement.keeping(all_kept)
    placement = with_mean_rank(placement, weights, options)
    return Decision(placement, tuple(notes) if placement.replaced_layers else ())


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


def _number_kept(weights: TeacherWeights, options: ConversionOptions, replacement: Layer, free: list[int]) -> int:
    """Count the replaceable layers that keep attention: as asked, as the cache has room for, or half."""
    if options.cache is not None:
        return num_layers_within(weights, options, replacement, free)
    asked = options.placement.attention_layers
    return len(uniform_attention_layers(len(free), 0.5 if asked is None else asked))


def _spread(placement: Placement, budget: Budget, aligner: "Aligner | None", notes: list[str]) -> Placement:
    """Distribute window lengths by measured layer error; return the placement unchanged without an aligner."""
    if aligner is None:
        notes.append("how wide each layer's window is, is measured during the run; until then all have the mean width")
        return placement
    from .layer_costs import layer_errors, spread_windows

    errors = layer_errors(aligner, placement)
    aligner.report["window_errors"] = {layer: float(f"{error:.4g}") for layer, error in errors.items()}
    heads = budget.windowed_heads(placement)
    columns = budget.columns(placement)
    return placement.with_windows(spread_windows(columns, errors, heads, budget.longest_window, budget.block))


def _ranked(weights: TeacherWeights, aligner: "Aligner | None", notes: list[str]) -> list[KVHead]:
    """Key/value heads, those that serve recall most first; without an aligner, evenly spread over the layers."""
    if aligner is not None:
        from .retrieval import ranked_heads, retrieval_scores

        scores = retrieval_scores(aligner.model, aligner.ids, aligner.options.seed, aligner.progress)
        aligner.report["retrieval_scores"] = [[round(score, 4) for score in of_layer] for of_layer in scores.tolist()]
        return ranked_heads(scores, Budget(weights, aligner.options).shared)
    notes.append(STAND_INS.format("heads"))
    layers, kv_heads = weights.config.num_hidden_layers, weights.config.num_key_value_heads
    return [(layer, kv) for kv in range(kv_heads) for layer in range(layers)]
