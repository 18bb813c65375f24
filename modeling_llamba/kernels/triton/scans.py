"""Scans and convolutions of mixers on a GPU, by the kernels of other packages: fla, mamba_ssm and causal-conv1d.

Shapes: B batch, L length, H heads, G groups, U states, P head dim, N state, I inner width. mixers/ssd.py has the
recurrence, which these are compared with.
"""

import torch
from torch import nn
from torch.torch_version import TorchVersion
from transformers.utils import logging

from ...mixers.ssd import is_recorded, repeat_groups
from ...model.precision import full_precision
from ...model.sequences import sequence_starts
from ..backend import BACKEND_VARIABLE

# installed and yet unusable: Triton says in several ways that there is no GPU, kernels that they are for another torch
try:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except (ImportError, RuntimeError, OSError, AttributeError):
    mamba_chunk_scan_combined = None
try:
    from fla.ops.simple_gla import chunk_simple_gla
except (ImportError, RuntimeError, OSError, AttributeError):
    chunk_simple_gla = None
try:
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
except (ImportError, RuntimeError, OSError, AttributeError):
    causal_conv1d_fn = causal_conv1d_update = None
try:
    import triton
except ImportError:  # then there is no fla either
    triton = None

logger = logging.get_logger(__name__)

# Decays closer to 1 than this are clamped for mamba_ssm only, which has to divide x by -log_a. A million tokens decay
# by 1e-6 then, and neither x / 1e-12 nor its product with 1e-12 leaves the range of float32 or bf16.
KERNEL_MIN_STEP = 1e-12


def choose_scan(asked: str, recording: bool) -> str:
    """Choose which of "torch", "mamba_ssm" and "fla" runs the scan of tensors on CUDA.

    "auto" takes fla's kernel where that is installed, else mamba_ssm's where no gradient is wanted, else torch.
    mamba_ssm's has no gradient here: x is divided by -log_a for it, and near a = 1 the gradient of that is a small
    difference of large numbers (docs/results/kernels.md). fla's has (but see `fla_gradient_problem`).

    Raises:
        ValueError: what is asked for by name is not installed, or not for this.
    """
    kernels = {"mamba_ssm": mamba_chunk_scan_combined, "fla": chunk_simple_gla}
    if asked in kernels and kernels[asked] is None:
        package = {"mamba_ssm": "mamba-ssm", "fla": "fla-core"}[asked]
        raise ValueError(f"The {asked} backend needs the package {package}; use backend 'torch'.")
    if asked == "mamba_ssm" and recording:
        raise ValueError("The mamba_ssm backend loses gradients of decays near 1: train with 'auto', 'fla', 'torch'.")
    uses_fla = asked in ("auto", "fla") and chunk_simple_gla is not None
    problem = fla_gradient_problem() if uses_fla and recording else None
    if problem is not None and asked == "fla":
        raise ValueError(f"{problem}, or set {BACKEND_VARIABLE}=torch.")
    if asked != "auto":
        return asked
    if uses_fla and problem is None:
        return "fla"
    if mamba_chunk_scan_combined is not None and not recording:
        return "mamba_ssm"
    return "torch"


@torch.compiler.assume_constant_result  # it could not be traced
def fla_gradient_problem() -> str | None:
    """Say why fla refuses to compute gradients here, once as a warning, too; None where it does not.

    Triton 3.4.0 to 3.7.0 compiles its backward pass wrongly for Hopper. tilelang, which it would take instead, has
    no states in float32.
    """
    version = TorchVersion(triton.__version__)
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    if not is_hopper or version < "3.4.0" or version >= "3.7.1":
        return None
    problem = (
        f"fla's kernels have no right gradients on Hopper GPUs with Triton {version}: upgrade triton to 3.7.1 or later"
    )
    logger.warning_once(f"{problem}. Until then PyTorch's operations train.")
    return problem


def ssd_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size: int, asked: str):
    """The scan as `ssd_scan` of mixers/ssd.py describes it; None where PyTorch's operations are to do it."""
    runs = choose_scan(asked, recording=is_recorded(x, log_a, B, C, initial_state))
    if runs == "fla":
        return fla_scan(x, log_a, B, C, initial_state, seq_idx)
    if runs == "mamba_ssm":
        return mamba_ssm_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size)
    return None


def mamba_ssm_scan(x, log_a, B, C, initial_state, seq_idx, chunk_size):
    """mamba_ssm's kernel computes S = exp(dt A) S + dt x B: with A = -1 and dt = -log_a, x has to be divided by dt."""
    H = C.shape[2]
    shared = C.shape[2] // log_a.shape[-1]
    log_a = log_a.repeat_interleave(shared, dim=-1)
    if initial_state is not None:
        initial_state = initial_state.float().repeat_interleave(shared, dim=1)
    if seq_idx is not None:
        seq_idx = seq_idx.int()
    step = (-log_a.float()).clamp_min(KERNEL_MIN_STEP)
    y, state = mamba_chunk_scan_combined(
        repeat_groups(x, H).float() / step[..., None],
        step,
        -torch.ones(H, device=x.device, dtype=torch.float32),
        repeat_groups(B, H).float(),
        C.float(),
        chunk_size=max(chunk_size, 64),
        initial_states=initial_state,
        seq_idx=seq_idx,
        return_final_states=True,
    )
    return y, state[:, ::shared]


def fla_scan(x, log_a, B, C, initial_state, seq_idx):
    """fla's gated linear attention with a scalar gate is this recurrence with q = C, k = B, v = x and g = log_a.

    Its heads all have keys and values of their own, and packed sequences lie in one row, with a state each.
    """
    batch, L, H, _ = C.shape
    shared = H // log_a.shape[-1]
    dtype = x.dtype if x.dtype == B.dtype == C.dtype else torch.float32
    q, k, v = C.to(dtype), repeat_groups(B, H).to(dtype), repeat_groups(x, H).to(dtype)
    g = log_a.float().repeat_interleave(shared, dim=-1)
    if initial_state is not None:
        initial_state = initial_state.float().repeat_interleave(shared, dim=1)
    offsets = None
    first = None
    if seq_idx is not None:
        starts = sequence_starts(seq_idx)
        starts[:, 0] = True
        where = starts.flatten().nonzero()[:, 0]
        offsets = nn.functional.pad(where, (0, 1), value=batch * L)
        first = where % L == 0  # the sequences that begin a row and continue its state
        q, k, v, g = (t.flatten(0, 1)[None] for t in (q, k, v, g))
        if initial_state is not None:
            rows = initial_state
            initial_state = rows.new_zeros(len(where), *rows.shape[1:]).index_put((first.nonzero()[:, 0],), rows)
    with full_precision(x):
        y, state = chunk_simple_gla(
            q, k, v, g, scale=1.0, initial_state=initial_state, output_final_state=True, state_v_first=True,
            cu_seqlens=offsets,
        )  # fmt: skip
    if seq_idx is not None:
        y = y.view(batch, L, H, -1)
        state = state[first.roll(-1)]  # the last sequence of each row comes before the first of the next
    return y.float(), state[:, ::shared].float()


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """The short convolution of x (B, L, I) from its first token on; None where PyTorch's operations are to do it.

    Args:
        weight: (I, 1, width). activation: "silu" or "identity".
    """
    # the kernel needs a multiple of 8 channels, side by side; a single token has no stride of its own
    if causal_conv1d_fn is None or x.shape[1] == 1 or x.shape[2] % 8:
        return None
    if seq_idx is not None:
        seq_idx = seq_idx.int().contiguous()
    channels_last = x.contiguous().mT  # x is a slice of a projection
    return causal_conv1d_fn(channels_last, weight.squeeze(1), bias, seq_idx=seq_idx, activation=_name(activation)).mT


def convolve_one(
    x: torch.Tensor, past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> torch.Tensor | None:
    """The short convolution of one token x (B, 1, I), which is added to `past` (B, I, width), in place; None where
    causal-conv1d is not installed."""
    if causal_conv1d_update is None:
        return None
    return causal_conv1d_update(x[:, 0], past, weight.squeeze(1), bias, activation=_name(activation))[:, None]


def _name(activation: str) -> str | None:
    return None if activation == "identity" else activation
