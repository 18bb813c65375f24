"""A state that cannot be cropped, as it was some tokens ago, and what these tokens fed it: a crop replays them.

Multi-step verification as in Wang et al. 2024, The Mamba in the Llama.
"""

from collections.abc import Callable

import torch

CROPPABLE = 128
"""Tokens by which a cache that records can be cropped at least."""

NOT_RECORDED = "Call activate_past_recording() on the cache before the tokens that may be cropped."

Tensors = tuple[torch.Tensor, ...]


def check_crop(tokens_to_remove: int) -> None:
    """Refuse a length to keep, as older versions of transformers took it.

    Raises:
        ValueError: the number is positive.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"Pass crop the tokens to forget as a negative number, such as crop(-{tokens_to_remove}).")


class Recording:
    """A state some tokens ago, and what these tokens fed it.

    Args:
        base: the state, which is not changed in place.
        axes: where the tokens are counted in each of the tensors of `add`.
        replay: from a state and the tensors of some tokens to the state after them.
    """

    def __init__(self, base, axes: tuple[int, ...], replay: Callable):
        self.base, self.axes, self.replay = base, axes, replay
        self.tokens: Tensors | None = None

    def __len__(self) -> int:
        return 0 if self.tokens is None else self.tokens[0].shape[self.axes[0]]

    def add(self, new: Tensors) -> None:
        """Append tokens; far more than CROPPABLE are not kept."""
        if self.tokens is not None:
            pairs = zip(self.tokens, new, self.axes, strict=True)
            new = tuple(torch.cat([old, added], dim=axis) for old, added, axis in pairs)
        self.tokens = tuple(new)
        # not at every token, since CROPPABLE or more are replayed each time
        if len(self) > 2 * CROPPABLE:
            old = len(self) - CROPPABLE
            self.base = self.replay(self.base, self._columns(0, old))
            self.tokens = self._columns(old, CROPPABLE)

    def crop(self, tokens: int):
        """Forget the last tokens, and return the state after those that remain.

        Raises:
            ValueError: the recording has fewer tokens.
        """
        if tokens > len(self):
            raise ValueError(
                f"The cache cannot be cropped by {tokens} tokens: it recorded {len(self)}, and keeps {CROPPABLE} at "
                "least; draft fewer tokens at a time."
            )
        self.forget(tokens)
        return self.replay(self.base, self.tokens) if len(self) else self.base

    def forget(self, tokens: int) -> None:
        """Forget the inputs of the last tokens alone."""
        if tokens:
            self.tokens = self._columns(0, len(self) - tokens)

    def _columns(self, start: int, length: int) -> Tensors:
        return tuple(t.narrow(axis, start, length) for t, axis in zip(self.tokens, self.axes, strict=True))
