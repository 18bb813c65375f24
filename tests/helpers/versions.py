"""What older versions of transformers get wrong in code of theirs that our tests run."""

import inspect

import pytest
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

KNOWS_WHAT_CAN_BE_CROPPED = hasattr(DynamicLayer, "is_croppable")  # from 5.17 on

grouped_norm = pytest.mark.skipif(
    "group_size" not in inspect.signature(BambaRMSNormGated).parameters,
    reason="before 5.23 Bamba and GraniteMoeHybrid normalise all heads of a mixer at once, whatever mamba_n_groups is",
)
"""For tests of these native classes."""

recorded_windows = pytest.mark.skipif(
    "num_visible" not in inspect.getsource(DynamicSlidingWindowLayer.update),
    reason="before 5.18 a sliding window that records returns more keys than its mask has after a second pass",
)
"""For tests of several passes without a crop beside sliding windows."""
