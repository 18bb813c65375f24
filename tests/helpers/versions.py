"""What older versions of transformers get wrong in code of theirs that our tests run."""

import inspect

import pytest
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

KNOWS_WHAT_CAN_BE_CROPPED = hasattr(DynamicLayer, "is_croppable")  # from 5.17 on

grouped_norm = pytest.mark.skipif(
    "group_size" not in inspect.signature(BambaRMSNormGated).parameters,
    reason="before 5.23 Bamba and GraniteMoeHybrid normalise all heads of a mixer at once, whatever mamba_n_groups is",
)
"""For tests of these native classes."""

TAKES_DRAFTS_BACK = "num_visible" in inspect.getsource(DynamicSlidingWindowLayer.update)  # from 5.18 on
drafts = pytest.mark.skipif(not TAKES_DRAFTS_BACK, reason="before 5.18 drafts are refused")
"""For tests of drafts."""

recorded_windows = pytest.mark.skipif(
    not TAKES_DRAFTS_BACK,
    reason="before 5.18 a sliding window that records returns more keys than its mask has after a second pass",
)
"""For tests of several passes without a crop beside sliding windows."""

phi3_reads_again = pytest.mark.skipif(
    not KNOWS_WHAT_CAN_BE_CROPPED, reason="in 5.16 Phi-3 itself loses its cache where it reads all tokens again"
)
"""For tests that compare generation across the switch of LongRoPE with transformers' Phi-3."""

states_before = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="the code of these checkpoints needs 5.21 or later"
)
"""For tests of checkpoints of format 1 that run the code that they carry."""
