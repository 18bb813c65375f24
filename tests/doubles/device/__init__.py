"""A stand-in for a CUDA device, on which whole programs run where there is none.

A tensor on it is an ordinary subclass (tensor.py): it says `cuda:0`, holds its data on the host, and has every
operation of ATen go through Python, where it is checked, counted and carried out on the CPU. What CUDA refuses is
refused in CUDA's words: tensors of several devices, a generator of another device, `.numpy()`, products of integers,
more memory than there is. What `torch.cuda` asks of C++ is answered (cuda.py), all but streams and events, and three
places in C++ that otherwise end a program without CUDA are replaced (native.py).

Why not something there is: PyTorch's fake tensors have no values, so nothing that fits, samples or stops at a token
runs to its end; a dispatch mode is off in threads, and loaders of weights use threads; a device of the kind
PrivateUse1 has a name of its own, and libraries look for `cuda`; the meta device has neither values nor an owner.

    with StandIn(limit=2**30) as device:
        model.to("cuda")
        with device.counting() as counts:
            model(ids.to("cuda"))
        counts.syncs, counts.launches, device.peak()

It does not compute as a GPU does: rounding, speed and Triton's kernels are the host's or absent; a launch is one
operation of ATen, whatever it takes on a GPU; what a kernel allocates within is not in the books.
"""

from .standin import Counts, StandIn
from .tensor import DeviceTensor

__all__ = ["Counts", "DeviceTensor", "StandIn"]
