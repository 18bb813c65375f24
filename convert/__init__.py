"""convert-to-hybrid: turn a pretrained Transformer into a hybrid Mamba/attention model.

from convert import convert
convert("HuggingFaceTB/SmolLM2-135M-Instruct", "hybrid", attention_layers=0.5)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .options import ConversionOptions
    from .pipeline import convert, plan_conversion
    from .plan import Plan

__all__ = ["ConversionOptions", "Plan", "convert", "plan_conversion"]


def __getattr__(name: str):
    """Import on first use: torch and transformers take seconds, and `convert-to-hybrid --help` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import options, pipeline, plan

    return next(getattr(module, name) for module in (options, pipeline, plan) if hasattr(module, name))
