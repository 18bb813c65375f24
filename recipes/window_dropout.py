"""Keep the mixer of a hybrid layer in use: drop windows early in training, and say what each branch is worth after it.

Trained end to end, a layer that has both may come to rest on its window alone (arXiv 2510.05901). So a share of the
sequences does without it at first, less and less; and what is lost without either branch is measured at the end.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import TrainerCallback

BRANCHES = {"without_window": "attention", "without_mixer": "ssd"}


def hybrid_mixers(model: nn.Module) -> list[nn.Module]:
    """The layers that hold a window beside a mixer, of the installed class or a folder's own."""
    found = [module for module in model.modules() if type(module).__name__ == "HybridMixer"]
    return [module for module in found if module.ssd is not None]


class WindowDropout(TrainerCallback):
    """From `start` linearly to 0 over the first `share` of the steps.

    Raises:
        ValueError: the model has no layer with a window.
    """

    def __init__(self, model: nn.Module, start: float, share: float):
        self.layers, self.start, self.share = hybrid_mixers(model), start, share
        if not self.layers:
            raise ValueError("window_dropout: the model has no window beside a mixer; leave it at 0.")

    def at(self, step: int, steps: int) -> float:
        """The chance in a step of so many."""
        return self.start * max(1 - step / max(self.share * steps, 1), 0.0)

    def on_step_begin(self, args, state, control, **kwargs):
        """Set it; a function of the step alone, so that a resumed run goes on as it would have."""
        for layer in self.layers:
            layer.window_dropout = self.at(state.global_step, state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        """Leave the model as it is used."""
        for layer in self.layers:
            layer.window_dropout = 0.0


@contextlib.contextmanager
def without(model: nn.Module, branch: str) -> Iterator[None]:
    """Every hybrid layer without its "attention" or its "ssd", whose features are zero."""

    def silent(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    handles = [getattr(layer, branch).register_forward_hook(silent) for layer in hybrid_mixers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
