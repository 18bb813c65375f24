"""Make the hybrid behave like its teacher: closed-form fits, layer selection, the stages of MOHAWK."""

from .align import Progress
from .alignment import Alignment, ClosedFormAligner
from .budget import BudgetSearch
from .settings import AlignmentSettings, read_alignment_file

__all__ = ["Alignment", "AlignmentSettings", "BudgetSearch", "ClosedFormAligner", "Progress", "read_alignment_file"]
