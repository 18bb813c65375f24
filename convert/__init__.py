"""convert-to-hybrid: turn a pretrained Transformer into a hybrid that needs a fraction of its cache.

from convert import convert
convert("HuggingFaceTB/SmolLM2-135M-Instruct", "hybrid", attention_layers=0.5)

Whatever a user can mend (options, files, checkpoints, the Hub) is a ValueError of one line that says how.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dry_run import plan_conversion
    from .options import ConversionOptions
    from .pipeline import convert
    from .plan import Plan

MODULES = {"ConversionOptions": "options", "Plan": "plan", "convert": "pipeline", "plan_conversion": "dry_run"}
__all__ = ["ConversionOptions", "Plan", "convert", "plan_conversion"]


def __getattr__(name: str):
    """Import on first use: torch and transformers take seconds, and `convert-to-hybrid --help` needs neither."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{MODULES[name]}", __name__), name)
