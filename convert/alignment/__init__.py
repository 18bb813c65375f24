"""Make the hybrid behave like its teacher: closed-form fits, layer selection, the stages of MOHAWK."""

from .align import Progress
from .alignment import Alignment, ClosedFormAligner
from .budget import BudgetSearch
from .settings import BUDGET_LENGTH, AlignmentSettings, read_alignment_file

__all__ = [
    "BUDGET_LENGTH",
    "Alignment",
    "AlignmentSettings",
    "BudgetSearch",
    "ClosedFormAligner",
    "Progress",
    "read_alignment_file",
]
