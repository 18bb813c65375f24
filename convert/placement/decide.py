"""Decide what every layer holds: what the user says, a published preset, or what scores find within a cache budget."""

import dataclasses
from typing import TYPE_CHECKING

from ..options import ConversionOptions
from ..plan import TeacherWeights
from .budget import Budget, KVHead, hybrid_layer, num_layers_within
from .placement import Decision, Hybrid, Layer, Mixer, Placement, everywhere
from .presets import (  # fmt: skip
    attention_layers,
    counted_heads,
    evenly_of,
    kept_heads,
    query_heads,
    uniform_attention_layers,
)

if TYPE_CHECKING:  # what takes scores imports transformers' models, which takes seconds, and a dry run takes none
    from ..alignment.aligner import Aligner

STAND_INS = "which {} keep their attention is decided by scores during the run; those shown are as many, evenly placed"


def options_for_teacher(options: ConversionOptions, weights: TeacherWeights) -> ConversionOptions:
    """The options; where all layers of the teacher see a window, a cache budget chooses only how many of them stay.

    Beyond windows of its own the teacher sees nothing, so where they are replaced, the read is linear.
    """
    if "sliding_attention" not in weights.config.layer_types:
        return options
    if options.mixer.read is None and options.read == "normalised":
        linear = dataclasses.replace(options, mixer=dataclasses.replace(options.mixer, read="linear"))
        options = linear if _replaces_windows(weights, linear) else options
    if not options.searches_budget or not _sees_windows_alone(weights):
        return options
    placement = options.placement
    no_window = options.mixer.kind == "none" and placement.window is None
    if options.names_layers or placement.attention_heads is not None or no_window:
        raise ValueError(
            "This teacher's own layers see a window, so a cache budget chooses only how many of them stay; leave out "
            "attention_layers and attention_heads, and give mixer none a window."
        )
    if options.read == "normalised":
        raise ValueError(
            "This teacher's own layers see a window, so nothing lies beyond it to be read as softmax would; leave out "
            "mixer.read."
        )
    return options


def _sees_windows_alone(weights: TeacherWeights) -> bool:
    """Whether every layer of the teacher sees a window only."""
    return set(weights.config.layer_types) == {"sliding_attention"}


def _replaces_windows(weights: TeacherWeights, options: ConversionOptions) -> bool:
    """Whether something else may take the place of the teacher's own windows."""
    kinds = weights.config.layer_types
    if options.searches_budget and "full_attention" in kinds:
        return not Budget(weights, options).kept_windows
    kept = attention_layers(len(kinds), options.placement.attention_layers) if options.names_layers else ()
    return any(kind == "sliding_attention" and i not in kept for i, kind in enumerate(kinds))


def decide_placement(
    weights: TeacherWeights, options: ConversionOptions, aligner: "Aligner | None" = None
) -> Decision:
    """What every layer holds.

    Args:
        aligner: fits the mixers that are scored, and has the text. Without one (a dry run, or no alignment) layers and
            heads that scores would choose are placed evenly: their number and bytes are the same.

    Raises:
        ValueError: layers or heads that the teacher does not have, or nothing that keeps within the cache.
    """
    num_layers, asked_heads = weights.config.num_hidden_layers, options.placement.attention_heads
    aligned = options.alignment.method != "none"
    if options.searches_budget and not _sees_windows_alone(weights):
        budget, notes = Budget(weights, options), []
        ranked = [] if budget.asked_heads == 0 else _ranked(weights, aligner, notes)
        placement = budget.placement([pair for pair in ranked if pair not in budget.given_heads])
        if placement.hybrid is not None and options.placement.window is None and options.read == "normalised":
            placement = _spread(placement, budget.longest_window, aligner, notes)
        return Decision(placement, tuple(notes) if placement.replaced_layers else ())
    replacement, notes = replaced_layer(options), []
    if options.names_layers:
        kept = attention_layers(num_layers, options.placement.attention_layers)
    else:
        count = len(uniform_attention_layers(num_layers, _share(weights, options, replacement)))
        # beside a window those that have one in the teacher are the last to stay
        own = Budget(weights, options).windows if isinstance(replacement, Hybrid) else ()
        others = [layer for layer in range(num_layers) if layer not in own]
        kept = evenly_of(others, min(count, len(others))) + evenly_of(own, max(count - len(others), 0))
        if aligned and 0 < count < len(others):
            if aligner is None:
                notes.append(STAND_INS.format("layers"))
            else:
                from .layer_costs import costliest_layers

                kept = costliest_layers(aligner, replacement, count)
    placement = everywhere(replacement, num_layers).keeping(kept)
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
        placement = placement.with_full_heads(heads)
    return Decision(placement, tuple(notes) if placement.replaced_layers else ())


def replaced_layer(options: ConversionOptions) -> Layer:
    """What replaces a layer's attention."""
    window = options.placement.window
    return Mixer() if window is None else hybrid_layer(options, window)


def _share(weights: TeacherWeights, options: ConversionOptions, replacement: Layer) -> float:
    """The share of layers that keep attention: as asked, as many as the cache has room for, or half."""
    if options.cache is not None:
        return num_layers_within(weights, options, replacement) / weights.config.num_hidden_layers
    asked = options.placement.attention_layers
    return 0.5 if asked is None else asked


def _spread(placement: Placement, longest: int, aligner: "Aligner | None", notes: list[str]) -> Placement:
    """The same with windows that are wider where they do more; without an aligner, as it is."""
    if aligner is None:
        notes.append("how wide each layer's window is, is measured during the run; until then all have the mean width")
        return placement
    from .layer_costs import layer_errors, spread_windows

    errors = layer_errors(aligner, placement)
    aligner.report["window_errors"] = {layer: float(f"{error:.4g}") for layer, error in errors.items()}
    return placement.with_windows(spread_windows(placement.hybrid.window, errors, longest))


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
