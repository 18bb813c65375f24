"""Compile the kernels for one token of a layer with the normalised read for GPUs that need not be here.

    python -m tests.kernels.ahead_of_time

prints as JSON what each variant takes. A process of its own, since nothing can be compiled in the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CAPABILITIES = (80, 90)  # A100, H100
SHAPES = {  # K, R, D, planes, dtype of all but state and log mass
    "SmolLM2-135M": (3, 3, 64, 32, "bf16"),
    "Llama-3.2-1B": (8, 4, 64, 32, "bf16"),
    "Llama-3.1-8B": (8, 4, 128, 64, "bf16"),
    "Phi-2": (32, 1, 80, 16, "fp32"),
    "Gemma-2-2B": (4, 2, 256, 128, "bf16"),
}
WINDOW = {"S": 4, "P": 16, "W": 213, "SINK_TILE": 4, "PLACE_TILE": 16}
KERNELS = ("read_one_kernel", "mix_one_kernel")


def tools() -> Path:
    """Where the wheel of triton has NVIDIA's ptxas and cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(capability: int, shape: str, name: str) -> dict[str, int]:
    """Registers of a thread; bytes of its stack and of spilled registers; bytes shared by a block of 8 warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import modeling_llamba.normalised_read_kernel as kernels

    function = getattr(kernels, name)
    K, R, D, planes, dtype = SHAPES[shape]
    slow = planes // 2
    N = D - 2 * (planes - slow)
    (rows, columns), (slots, dims) = kernels.tile_of(D, N), kernels.tile_of(D, D)
    types = dict.fromkeys(function.arg_names, f"*{dtype}")
    types |= dict.fromkeys(("state", "log_mass", "salience", "new_salience"), "*fp32")
    types |= dict.fromkeys(("leaving", "index", "place_index", "latest"), "*i64")
    types |= dict.fromkeys(("batch_stride", "head_stride", "column_stride", "leaving_stride", "index_stride"), "i32")
    types |= {"full_heads": "i64", "n_full": "i32", "scale": "fp32", "softcap": "fp32"}
    constants = {"K": K, "R": R, "D": D, "N": N, "PLANES": planes, "SLOW_PLANES": slow} | WINDOW
    constants |= {"ROWS": rows, "COLUMNS": columns, "SLOTS": slots, "DIMS": dims}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, {name: types[name] for name in function.arg_names}, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tools() / "cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, spilled = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + spilled, "shared": kernel.metadata.shared}


if __name__ == "__main__":
    variants = [(capability, shape, name) for name in KERNELS for capability in CAPABILITIES for shape in SHAPES]
    json.dump({f"{name}, sm_{c}, {shape}": compiled(c, shape, name) for c, shape, name in variants}, sys.stdout)
