"""What it costs that a head sees a window and sinks only: all heads at once, by integrated gradients.

A gate per head mixes its two outputs, o + g (w - o): full attention at g = 0, the window at 1. Along the straight line
from the teacher to all windows the loss changes by the sum over heads of the integral of its derivative to the gates,
so those integrals are costs that add up by construction (Sundararajan et al. 2017); ablating a head at a time knows
nothing of the others. A few points of the line, a forward and a backward pass each, do for every head of a model.

Shapes: B batch, L length, H query heads, D head dim.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modeling_llamba.hybrid_mixer import unpadded
from modeling_llamba.window_attention import WindowAttention

from ..alignment.teacher_model import TeacherModel

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states after the final norm (B, L, model) to nats."""


def window_attention(teacher: TeacherModel, layer: int, window: int, sinks: int) -> WindowAttention:
    """The attention of a layer restricted to a window and sinks; it shares the teacher's weights."""
    fields = teacher.config.to_dict() | {"hybrid_window": window, "hybrid_sinks": sinks, "hybrid_full_heads": None}
    config = type(teacher.config)(**{name: value for name, value in fields.items() if name != "model_type"})
    full = teacher.block(layer).self_attn
    with torch.device("meta"):
        near = WindowAttention(config, layer)
    for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
        setattr(near, name, getattr(full, name))
    return near.eval()


@contextlib.contextmanager
def gated_heads(teacher: TeacherModel, window: int, sinks: int, gates: torch.Tensor) -> Iterator[None]:
    """Inside the block, head h of layer l is gates[l, h] of the way from full attention to the window."""
    handles = []
    for layer in range(teacher.num_layers):
        attention, seen = teacher.block(layer).self_attn, []
        near = window_attention(teacher, layer, window, sinks)

        def note(module, args, kwargs, seen=seen):
            seen[:] = [args[0], args[1] if len(args) > 1 else kwargs["position_embeddings"]]

        def mix(module, args, layer=layer, near=near, seen=seen):
            (full,) = args
            gate = gates[layer].repeat_interleave(near.head_dim)
            return full + gate * (near(*seen, unpadded(seen[0])) - full)

        handles.append(attention.register_forward_pre_hook(note, with_kwargs=True))
        handles.append(attention.o_proj.register_forward_pre_hook(mix))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def gated_layers(teacher: TeacherModel, mixers: dict[int, nn.Module], gates: torch.Tensor) -> Iterator[None]:
    """Inside the block, layer l is gates[l] of the way from its attention to its mixer."""

    def mix(module, args, kwargs, output, layer: int):
        rotary = args[1] if len(args) > 1 else kwargs["position_embeddings"]
        return (output[0] + gates[layer] * (mixers[layer](args[0], rotary) - output[0]), *output[1:])

    handles = [
        teacher.block(layer).self_attn.register_forward_hook(
            lambda *call, layer=layer: mix(*call, layer=layer), with_kwargs=True
        )
        for layer in mixers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def final_hidden(teacher: TeacherModel, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states after the final norm, a block recomputed at a time in the backward pass."""
    hidden = teacher.embed(ids)
    inputs = teacher.block_inputs(hidden)
    for block in teacher.whole().model.layers:
        hidden = checkpoint(block, hidden, use_reentrant=False, **inputs)
    return teacher.model.model.norm(hidden)


def integrated_costs(
    teacher: TeacherModel,
    ids: torch.Tensor,
    loss: Loss,
    shape: tuple[int, ...],
    gated: Callable[[torch.Tensor], contextlib.AbstractContextManager],
    points: int,
    kept: Callable[[int, Callable[[], list]], list] = lambda point, compute: compute(),
) -> torch.Tensor:
    """What each gate costs in nats, the gates' `shape`; their sum is about loss(all gates 1) - loss(all 0).

    Args:
        ids: (B, L). gated: gates to a context inside which the teacher runs with them. points: of the midpoint rule.
        kept: is asked for the derivatives at a point, and given a way to compute them.
    """

    def derivatives(point: int) -> list:
        gates = torch.full(shape, (point + 0.5) / points, device=teacher.device, requires_grad=True)
        with torch.enable_grad(), gated(gates):
            # the blocks are run again in the backward pass, so it is inside the context, too
            loss(final_hidden(teacher, ids)).backward()
        return gates.grad.tolist()

    found = [kept(point, lambda point=point: derivatives(point)) for point in range(points)]
    return torch.tensor(found).mean(0)
