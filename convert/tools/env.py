"""Versions, devices and kernels of this machine, and which code runs on it."""

import importlib
import importlib.metadata
import os
import platform
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from modeling_llamba.kernels.backend import BACKEND_VARIABLE, requested_backend
from modeling_llamba.kernels.c.c_library import COMPILE_VARIABLE, LIBRARY_FOLDER, PROBLEMS, forbidden, library
from modeling_llamba.kernels.triton.scans import choose_scan, fla_gradient_problem

LIBRARIES = (
    "convert-to-hybrid", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "accelerate",
    "datasets", "peft", "trl", "lm-eval", "gguf",
)  # fmt: skip
# name of the package -> the module that must import for it to be usable
KERNELS = {
    "mamba-ssm": "mamba_ssm.ops.triton.ssd_combined",
    "causal-conv1d": "causal_conv1d",
    "flash-attn": "flash_attn",
    "fla-core": "fla.ops.simple_gla",
    "triton": "triton",
}


def environment() -> dict[str, Any]:
    """Versions, devices, kernels and backends, as plain data."""
    kernels = {package: _kernel(package, module) for package, module in KERNELS.items()}
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {library: _version(library) for library in LIBRARIES},
        "threads": torch.get_num_threads(),
        "cuda": {
            "built_for": torch.version.cuda,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "kernels": kernels,
        "backends": _backends(kernels, cuda),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel(package: str, module: str) -> dict[str, str | None]:
    """Version of a package, and why it cannot be used if it cannot."""
    version = _version(package)
    if version is None:
        return {"version": None, "problem": "not installed"}
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        return {"version": version, "problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"version": version, "problem": None}


def _backends(kernels: dict[str, dict[str, str | None]], cuda: bool) -> dict[str, dict[str, str]]:
    """List the implementation that runs, and why, for each part that has more than one."""

    def choose(name: str, package: str) -> dict[str, str]:
        problem = kernels[package]["problem"]
        if not cuda:
            return {"runs": "torch", "why": "no CUDA device"}
        if problem:
            return {"runs": "torch", "why": f"{package}: {problem}"}
        return {"runs": name, "why": f"{package} {kernels[package]['version']} on CUDA"}

    scan = choose("fla", "fla-core")
    inference = choose("mamba_ssm", "mamba-ssm")
    if scan["runs"] == "torch" and inference["runs"] == "mamba_ssm":
        scan = inference | {"why": f"{inference['why']}; torch where a gradient is wanted ({scan['why']})"}
    if scan["runs"] == "fla" and (problem := fla_gradient_problem()):
        scan["why"] += f"; torch where a gradient is wanted ({problem})"
    conv = choose("causal_conv1d", "causal-conv1d")
    read = choose("triton", "triton")
    window = choose("flex_attention", "triton")
    compiled = library()
    where = f"compiled at first use into {LIBRARY_FOLDER}"
    if compiled is not None and not compiled._name.startswith(str(LIBRARY_FOLDER)):
        where = f"compiled anew by each process, since {LIBRARY_FOLDER} cannot hold a library that runs"
    on_cpu = {"runs": "C", "why": f"{where}; {COMPILE_VARIABLE}=0 forbids it"}
    if compiled is None:
        why = f"{COMPILE_VARIABLE}={os.environ[COMPILE_VARIABLE]} forbids it" if forbidden() else PROBLEMS[0]
        on_cpu = {"runs": "torch", "why": why}
    if asked := os.environ.get(BACKEND_VARIABLE):
        try:
            asked = requested_backend("auto")
            if not cuda and asked in ("fla", "mamba_ssm"):
                raise ValueError("no CUDA device")
            runs = choose_scan(asked, recording=False) if cuda else "torch"
            scan = {"runs": runs, "why": f"{BACKEND_VARIABLE} asks for {asked}"}
        except ValueError as error:
            scan = {"runs": "nothing", "why": f"{BACKEND_VARIABLE} asks for {asked}: {error}"}
        if asked == "torch":
            conv = read = window = on_cpu = {"runs": "torch", "why": f"{BACKEND_VARIABLE} says so"}
    else:
        scan["why"] += "; backend of a model may ask otherwise"
    flash = "flash_attention_2 cannot be used here"
    if cuda:
        from transformers.utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            flash = "flash_attention_2 on request"
    return {
        "SSD scan (discrete_mamba2, mamba2)": scan,
        "selective scan (mamba1)": {"runs": "torch", "why": "the only implementation here"},
        "short convolution": conv,
        "window and readout of the state, one token": read,
        "window, prompt": window,
        "few bits and one token on a CPU": on_cpu,
        "attention": {"runs": "sdpa", "why": f"torch's own; {flash}"},
    }


def describe_environment(report: dict[str, Any]) -> Group:
    """The report of `environment` as tables for a terminal."""
    versions = Table.grid(padding=(0, 2))
    versions.add_row("python", report["python"])
    versions.add_row("platform", report["platform"])
    for name, version in report["versions"].items():
        versions.add_row(name, version or "not installed")
    devices = ", ".join(report["cuda"]["devices"]) or "no CUDA device"
    versions.add_row("device", f"{devices}; threads on the CPU: {report['threads']}")
    kernels = Table("kernel", "version", "usable")
    for name, kernel in report["kernels"].items():
        kernels.add_row(name, kernel["version"] or "-", kernel["problem"] or "yes")
    backends = Table("part", "runs on", "because")
    for part, choice in report["backends"].items():
        backends.add_row(part, choice["runs"], choice["why"])
    return Group(versions, kernels, backends)
