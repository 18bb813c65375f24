"""OLMo 3: OLMo 2's block; three of four layers attend to a window, and only the others stretch their RoPE."""

from .base import TeacherFamily, local_rope
from .olmo2 import OLMO2

OLMO3 = TeacherFamily(
    model_type="olmo3",
    title="OLMo 3",
    hybrid="llamba",
    windows=True,
    tensors=OLMO2.tensors,
    fields=OLMO2.fields,
    constants=OLMO2.constants,
    special=local_rope,
)
