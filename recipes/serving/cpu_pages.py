"""A token of each request on a CPU in C, which reads and writes vLLM's pages where they lie.

PyTorch's operations copy a slot out of its pages and back, by dozens of calls a layer, which takes ten times as long
as what they compute. The functions of pages.c are those of modeling_llamba/kernels/c around the same arithmetic.

Shapes: B batch (requests), H' heads with a window, K key/value heads, R heads per key/value head, P head dim,
T columns.
"""

import ctypes
from pathlib import Path

import torch

from modeling_llamba.kernels.backend import backend_for
from modeling_llamba.kernels.c.c_functions import in_c
from modeling_llamba.kernels.c.c_library import Layer, int64s, library, pointer

PAGES = Path(__file__).parent / "pages.c"
"""Source of the functions."""


def runs_in_c(like: torch.Tensor, dtype: torch.dtype, setting: str) -> bool:
    """Return True if the functions run here.

    Args:
        like: a tensor on the device. dtype: the model's. setting: `backend` of the configuration.
    """
    return backend_for(like, setting, dtype).compiled(PAGES) is not None


class SlotStep:
    """One token of a hybrid layer's heads with a window, in slots.

    Args:
        attention: the layer. places: first byte of each tensor of the layer among a request's slots. dtype: the
            model's.
    """

    def __init__(self, attention, places: dict[str, int], dtype: torch.dtype):
        shape = attention.shape
        K, R = attention.heads().groups
        P, planes, slow_planes = attention.head_dim, shape.slow.planes, shape.slow.slow_planes
        self.attention = attention
        self.places = int64s(*(places[name] for name in ("salience", "state", "keys", "values")))
        self.layer = Layer(
            K, R, P, P - 2 * (planes - slow_planes), shape.places + shape.window, shape.block, shape.sinks,
            shape.places, planes, slow_planes, attention.scaling, attention.softcap or 0.0,
        )  # fmt: skip
        self.roundings = [in_c(rounding, dtype, 1) for rounding in (shape.key_rounding, shape.value_rounding)]
        layer = self.layer
        of_column = 4 + sum(rounding[2] for rounding in self.roundings)
        self.room = 4 * (P + 1) * (layer.N + 1) + layer.T * of_column + 3 & ~3

    def __call__(
        self,
        memory: torch.Tensor,
        rows: torch.Tensor,
        index: torch.Tensor,
        salience: torch.Tensor,
        heads: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, 1, H', P) and features (B, 1, 3 H' P) of a token of each request.

        Args:
            memory: all pages. rows: (B, pages), those of each request. index: (B, 1), numbers of the tokens in their
                sequences. salience: (B, 1). heads: (B, 1, heads, P), queries, if there are any those to sinks that are
                far away, keys and values.
        """
        K, R, P = self.layer.K, self.layer.R, self.layer.P
        batch = len(rows)
        dtype = heads.dtype
        rows, index, salience = rows.contiguous(), index.contiguous(), salience.contiguous()
        heads = heads.float().contiguous()
        mass = self.attention.mass.detach().float().contiguous()
        has_sinks = heads.shape[2] > K * (R + 2)
        output, features = heads.new_empty(batch, 1, K * R, P), heads.new_empty(batch, 1, 3 * K * R * P)
        scratch = memory.new_empty(batch * K * self.room)
        library(PAGES).step_in_slots(
            pointer(memory), ctypes.c_int64(memory.shape[1]), pointer(rows), rows.shape[1], self.places,
            pointer(index), pointer(salience), pointer(heads), has_sinks,
            *map(pointer, (mass, output, features)), *self.roundings, self.layer, batch, pointer(scratch),
            ctypes.c_int64(self.room), torch.get_num_threads(),
        )  # fmt: skip
        return output.to(dtype), features.to(dtype)
