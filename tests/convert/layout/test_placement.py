"""A placement, and the decision that holds it."""

from convert.layout.placement import Attention, Decision, everywhere


def test_scores_are_needed_for_what_is_undecided_not_for_a_note():
    placement = everywhere(Attention(), 2)
    assert not Decision(placement, notes=("Layers were chosen by scores.",)).needs_scores
    assert Decision(placement, undecided=("heads",)).needs_scores
