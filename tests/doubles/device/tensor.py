"""A tensor that says it is on a CUDA device, and the way of its operations through Python."""

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .rules import PRODUCTS, aten, check_devices, check_kernel, draws, is_composite, launches, name_of, waits

if TYPE_CHECKING:
    from .standin import StandIn

ACTIVE: "list[StandIn]" = []
"""The stand-in of the context that is open, if one is."""


class DeviceTensor(torch.Tensor):
    """Data on the host under the name of a device; operations go through `run`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device):
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=device,
        )  # fmt: skip
        made.host = host
        ACTIVE[-1].note_memory(host, device.index)
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})

    def __repr__(self, **kwargs):
        for stand_in in ACTIVE:  # there may be none any more
            stand_in.note_wait("repr")
        return f"{self.host!r} on {self.device}"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__ |= {k: v for k, v in self.__dict__.items() if k != "host"}
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol):  # what is read again lies on the host
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def numpy(self, **kwargs):
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):  # for what compares where tensors lie
        return self.host.untyped_storage()

    def data_ptr(self):
        return self.host.data_ptr()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.host = other.host


def run(op, args: tuple, kwargs: dict) -> Any:
    """Check, count and carry out an operation in which a tensor of a device takes part."""
    if is_composite(op):
        return op.decompose(*args, **kwargs)
    stand_in = ACTIVE[-1]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours = [t for t in tensors if isinstance(t, DeviceTensor)]
    theirs = [t for t in tensors if not isinstance(t, DeviceTensor)]
    check_devices(op, ours, theirs, args)
    check_kernel(op, ours)
    device, name = ours[0].device, name_of(op)
    if kwargs.get("device") is not None:
        device = stand_in.indexed(kwargs["device"])
        kwargs = kwargs | {"device": torch.device("cpu") if device.type == "cuda" else device}
    kwargs.pop("pin_memory", None)
    moves = name == "_to_copy" and device != ours[0].device or name == "copy_" and args[0].device != args[1].device
    if moves and stand_in.copy_waits(name, args, kwargs) or waits(op, args, kwargs):
        stand_in.note_wait(op)
    if launches(op) and not moves:
        stand_in.note_launch(op)
    if draws(op):
        kwargs = kwargs | {"generator": stand_in.generator_of(device, kwargs.get("generator"))}
    hosts = {id(t.host): t for t in ours} | {id(t): t for t in theirs}
    args, kwargs = _on_host(args), _on_host(kwargs)
    out = stand_in.taped(_carried_out, op, args, kwargs)
    for t in ours:
        if t.shape != t.host.shape or t.stride() != t.host.stride():  # of an `out`, or by resize_, t_ and the like
            t.data = DeviceTensor(t.host, t.device)
    if device.type != "cuda":
        return out
    return tree_map_only(torch.Tensor, lambda t: hosts[id(t)] if id(t) in hosts else DeviceTensor(t, device), out)


def _carried_out(op, args: tuple, kwargs: dict) -> Any:
    name = name_of(op)
    if name == "histc" and not args[0].is_floating_point():  # which CUDA alone has
        return op(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if name in PRODUCTS and "dtype" in op._overloadname:  # likewise products in another type
        dtype = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype))
        args = tuple(t.to(dtype) if isinstance(t, torch.Tensor) else t for t in args if not isinstance(t, torch.dtype))
        op, kwargs = getattr(aten, name), {k: v for k, v in kwargs.items() if k != "out_dtype"}
    return op(*args, **kwargs)


def _on_host(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda t: t.host, tree)
