"""Qwen3-Next: Qwen3.5's attention, a Gated DeltaNet whose inputs are projected otherwise, and Qwen3-MoE's choice of
experts with one for all tokens beside it."""

from .base import TeacherFamily
from .qwen3_5 import DELTA_NET, QUERIES_AND_GATES, QWEN3_5, delta_net_tensors
from .qwen3_5_moe import SHARED_EXPERT
from .qwen3_moe import QWEN3_MOE

QWEN3_NEXT = TeacherFamily(
    model_type="qwen3_next",
    title="Qwen3-Next",
    hybrid="llamba",
    tensors={
        **QWEN3_MOE.tensors,
        **QUERIES_AND_GATES,
        **delta_net_tensors("in_proj_qkvz", "in_proj_ba"),
        **SHARED_EXPERT,
    },
    by_head=tuple(QUERIES_AND_GATES),
    stacked=QWEN3_MOE.stacked,
    other_parts=("mtp.",),
    fields={**QWEN3_MOE.fields, "shared_expert_intermediate_size": "shared_expert_intermediate_size"},
    constants=QWEN3_5.constants,
    recurrent=DELTA_NET,
    special=QWEN3_MOE.special,
)
