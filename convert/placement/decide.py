"""Decide what every layer holds: what the user says, a published preset, or a search."""

import dataclasses

from ..alignment.aligner import Aligner
from ..options import ConversionOptions
from ..plan import TeacherWeights
from .budget import Budget, budget_report, num_layers_within
from .layer_scores import choose_layers
from .placement import Decision, Hybrid, Layer, Mixer, Placement, everywhere
from .presets import attention_layers, counted_heads, kept_heads, query_heads, uniform_attention_layers
from .retrieval import choose_heads
from .search import BudgetSearch


def options_for_teacher(options: ConversionOptions, weights: TeacherWeights) -> ConversionOptions:
    """The options; where the teacher's own layers see a window, a cache budget chooses only how many of them stay.

    Raises:
        ValueError: the options say more about layers or heads than such a budget leaves open.
    """
    if not options.searches_budget or "sliding_attention" not in weights.config.layer_types:
        return options
    placement = options.placement
    if (
        options.names_layers
        or placement.attention_heads is not None
        or (options.mixer.kind == "none" and placement.window is None)
    ):
        raise ValueError(
            "This teacher's own layers see a window, so a cache budget chooses only how many of them stay; leave out "
            "attention_layers and attention_heads, and give mixer none a window."
        )
    return dataclasses.replace(options, placement=dataclasses.replace(placement, selection="kl+recall"))


def decide_placement(weights: TeacherWeights, options: ConversionOptions, aligner: Aligner | None = None) -> Decision:
    """What every layer holds.

    Args:
        aligner: fits the mixers that are scored, and has the text. Without one (a dry run, or no alignment) layers
            that scores would choose stand evenly placed, and heads are the first ones: their bytes are the same.

    Raises:
        ValueError: layers or heads that the teacher does not have, or nothing that keeps within the cache.
    """
    layers, heads = weights.config.num_hidden_layers, weights.config.num_key_value_heads
    if options.searches_budget:
        return _within_budget(Budget(weights, options), aligner)
    replacement, notes = replaced_layer(options), []
    if options.names_layers:
        kept = attention_layers(layers, options.placement.attention_layers)
    else:
        kept = uniform_attention_layers(layers, _share(weights, options, replacement))
        if options.selection != "uniform" and kept and len(kept) < layers:
            if aligner is None:
                notes.append(
                    "scores decide which layers keep their attention when this is run; here they are evenly placed"
                )
            else:
                aligner.follow(replacement)
                weight = options.placement.search.recall_weight if options.selection == "kl+recall" else 0.0
                kept = choose_layers(aligner, len(kept), weight)
    placement, asked = everywhere(replacement, layers).keeping(kept), options.placement.attention_heads
    if asked is not None and placement.replaced_layers:
        named = kept_heads(asked, layers, weights.config.num_attention_heads)
        if named is None:
            count, possible = counted_heads(asked, layers * heads), len(placement.replaced_layers) * heads
            if count > possible:
                raise ValueError(
                    f"attention_heads {asked} is {count} key/value heads; the replaced layers have {possible}."
                )
            named = _counted(weights, options, placement, count, aligner)
            if aligner is None:
                notes.append(
                    "scores decide which heads see everything when this is run; here only their number is right"
                )
        placement = placement.with_full_heads(named)
    return Decision(placement, notes=tuple(notes) if placement.replaced_layers else ())


def replaced_layer(options: ConversionOptions) -> Layer:
    """What stands in the place of a layer's attention."""
    if options.placement.window is None:
        return Mixer()
    return Hybrid(options.placement.window, options.placement.sinks, state=options.mixer.kind != "none")


def _share(weights: TeacherWeights, options: ConversionOptions, replacement: Layer) -> float:
    """The share of layers that keep attention: as asked, as many as the cache has room for, or half."""
    if options.cache is not None:
        return num_layers_within(weights, options, replacement) / weights.config.num_hidden_layers
    asked = options.placement.attention_layers
    return 0.5 if asked is None else asked


def _within_budget(budget: Budget, aligner: Aligner | None) -> Decision:
    candidates = budget.unscored_candidates(budget.options.sequence_length)
    if aligner is None:
        return Decision(budget.placement(candidates[0]), budget_report(budget, candidates, None, {}))
    if not budget.placement(candidates[0]).replaced_layers:
        return Decision(budget.placement(candidates[0]))
    placement, report = BudgetSearch(budget, aligner).run()
    aligner.report["budget"] = report
    return Decision(placement, report)


def _counted(weights, options, placement: Placement, count: int, aligner: Aligner | None):
    """The heads that serve recall most, or the first ones."""
    replaced = list(placement.replaced_layers)
    if aligner is not None:
        heads, scores = choose_heads(aligner.model, replaced, options.placement.window, count, options.seed)
        aligner.report["retrieval_scores"] = scores
        return heads
    kv_heads, shared = weights.config.num_key_value_heads, weights.config.num_attention_heads
    pairs = [(layer, kv) for layer in replaced for kv in range(kv_heads)]
    return query_heads(pairs[:count], shared // kv_heads)
