"""Keep the mixer of a hybrid layer in use: drop windows early in training, and say what each branch is worth after it.

Trained end to end, a layer that has both may come to rest on its window alone (arXiv 2510.05901). So a share of the
sequences does without it at first, less and less; and what is lost without either branch is measured at the end.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import TrainerCallback

BRANCHES = ("window", "mixer")


def hybrid_mixers(model: nn.Module) -> list[nn.Module]:
    """The mixers of layers that hold a window beside a mixer; told by the layer's type, as a folder's own code has
    classes of its own."""
    layers = [layer for layer in model.modules() if getattr(layer, "layer_type", None) == "hybrid"]
    return [layer.mixer for layer in layers if layer.mixer.ssd is not None]


class WindowDropout(TrainerCallback):
    """Lowers the chance to drop a sequence's window linearly from `start` to 0 over the first `share` of the steps.

    Raises:
        ValueError: the model has no layer with a window.
    """

    def __init__(self, model: nn.Module, start: float, share: float):
        self.layers, self.start, self.share = hybrid_mixers(model), start, share
        if not self.layers:
            raise ValueError("window_dropout: the model has no window beside a mixer; leave it at 0.")

    def at(self, step: int, steps: int) -> float:
        """The chance in step `step` of `steps`."""
        return self.start * max(1 - step / max(self.share * steps, 1), 0.0)

    def on_step_begin(self, args, state, control, **kwargs):
        """Set the chance, a function of the step alone, so that a resumed run goes on as it would have."""
        for layer in self.layers:
            layer.window_dropout = self.at(state.global_step, state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        """Leave no dropout in the trained model."""
        for layer in self.layers:
            layer.window_dropout = 0.0


def dropped_features(layer: nn.Module, branch: str) -> torch.Tensor:
    """Mask of out_proj's inputs that belong to the branch."""
    of_window = layer.window_features()
    of_mixer = torch.ones(layer.sizes[1], dtype=torch.bool)
    if branch == "window":
        return torch.cat([of_window, ~of_mixer])
    return torch.cat([torch.zeros_like(of_window), of_mixer])


@contextlib.contextmanager
def without(mixers: list[nn.Module], branch: str) -> Iterator[None]:
    """Run hybrid layers' mixers without their "window" or their "mixer", whose features then do not reach out_proj.

    Heads with full attention stay, and so do the first tokens of a sequence, which the window serves alone.
    """
    handles = []
    for layer in mixers:
        features = dropped_features(layer, branch)
        handles.append(
            layer.out_proj.register_forward_pre_hook(
                lambda module, inputs, features=features: (inputs[0].masked_fill(features.to(inputs[0].device), 0),)
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
