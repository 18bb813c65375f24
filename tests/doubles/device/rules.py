"""What CUDA refuses, what waits for it, and what launches nothing, by operations of ATen."""

import functools

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

BETWEEN_DEVICES = {"copy_", "_to_copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""These take indices that lie on the host, and send them over."""
SCALARS = INDEXING | {"fill_", "fill", "masked_fill", "masked_fill_", "where", "_fused_adamw_"}
"""Beside pointwise operations, these take a number that lies on the host."""
WAITING = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "multinomial", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd",
    "linalg_lstsq",
}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "addbmm"}
MAKES_ROOM = ("empty", "new_empty", "detach", "lift_fresh", "alias")


@functools.cache
def name_of(op: OpOverload) -> str:
    """The name without namespace and overload."""
    return op._schema.name.partition("::")[2]


@functools.cache
def takes_scalars(op: OpOverload) -> bool:
    """Return True if a tensor without dimensions may lie on the host."""
    name = name_of(op)
    packet = getattr(aten, name.removesuffix("_"), None)
    overloads = [op] if packet is None else [op, *(getattr(packet, o) for o in packet.overloads())]
    return name in SCALARS or any(torch.Tag.pointwise in overload.tags for overload in overloads)


@functools.cache
def launches(op: OpOverload) -> bool:
    """Return True if a kernel runs: it is no view and does not just make room or ask for something."""
    name = name_of(op)
    if op.is_view or name.startswith(MAKES_ROOM) or name in ("_unsafe_view", "_local_scalar_dense", "record_stream"):
        return False
    gives = any(returned.type.kind() in ("TensorType", "ListType") for returned in op._schema.returns)
    return gives or op._schema.is_mutable


@functools.cache
def draws(op: OpOverload) -> bool:
    """Return True if it takes random numbers from a generator."""
    return any(argument.name == "generator" for argument in op._schema.arguments)


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Return True if CUDA has no kernel of its own, and it is carried out as others; seen in inference mode."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def waits(op: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Return True if the host waits until the device has come to this operation; copies are judged elsewhere."""
    name = name_of(op)
    if name in INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        fills = len(args) > 2 and len(masks) == 1 and args[2].numel() == 1  # then it is masked_fill_
        return bool(masks) and not fills or any(i is not None and i.device.type == "cpu" for i in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAITING


def check_devices(op: OpOverload, ours: list[torch.Tensor], theirs: list[torch.Tensor], args: tuple) -> None:
    """Refuse tensors of several devices, as CUDA does."""
    name, first = name_of(op), args[0] if args else None
    if name in BETWEEN_DEVICES:
        return
    devices = {str(t.device) for t in ours}
    written = first if name.endswith("_") and isinstance(first, torch.Tensor) else None
    for t in theirs:
        index = name in INDEXING and any(t is i for i in args[1]) and first is not t
        scalar = t.ndim == 0 and t is not written and takes_scalars(op)
        if not index and not scalar:
            devices.add("cpu")
    if len(devices) > 1:
        both = " and ".join(sorted(devices, reverse=True)[:2])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {both}! ({op})"
        )


def check_kernel(op: OpOverload, ours: list[torch.Tensor]) -> None:
    """Refuse what CUDA has no kernel for."""
    name = name_of(op)
    if name in PRODUCTS and not ours[0].dtype.is_floating_point and not ours[0].is_complex():
        raise NotImplementedError(f"\"{name}_cuda\" not implemented for '{ours[0].dtype}'")
