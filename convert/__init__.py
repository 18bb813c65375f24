"""convert-to-hybrid: turn a pretrained Transformer into a hybrid Mamba/attention model."""

from .config import ConversionConfig
from .pipeline import convert, plan_conversion
from .plan import Plan

__all__ = ["ConversionConfig", "Plan", "convert", "plan_conversion"]
