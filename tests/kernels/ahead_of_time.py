"""Compile the kernels for one token, of a hybrid layer, its kept heads and its rows, for GPUs that need not be here.

    python -m tests.kernels.ahead_of_time

prints as JSON what each variant takes. A process of its own, since nothing can be compiled in the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from modeling_llamba.hybrid.rounding import Rounding

CAPABILITIES = (80, 90)  # A100, H100
ROWS = {"rows of 8 bits": 8, "rows of 6 bits": 6}
SHAPES = {  # K, R, P, planes, dtype of all but salience and state; or bf16 with keys and values in rows
    "SmolLM2-135M in 8 bits": (3, 3, 64, 32, "rows of 8 bits"),
    "Llama-3.1-8B in 8 bits": (8, 4, 128, 64, "rows of 8 bits"),
    "Gemma-2-2B in 8 bits": (4, 2, 256, 128, "rows of 8 bits"),
    "SmolLM2-135M in 6 bits": (3, 3, 64, 32, "rows of 6 bits"),
    "SmolLM2-135M": (3, 3, 64, 32, "bf16"),
    "Llama-3.2-1B": (8, 4, 64, 32, "bf16"),
    "Llama-3.1-8B": (8, 4, 128, 64, "bf16"),
    "Phi-2": (32, 1, 80, 16, "fp32"),
    "Gemma-2-2B": (4, 2, 256, 128, "bf16"),
}
HELD = {"SINKS": 4, "S": 20, "C": 256, "E": 16}
KEPT = {  # K, R, P, bits of keys and of values
    "kept heads of SmolLM2-135M": (3, 3, 64, 6, 4),
    "kept heads of Llama-3.1-8B": (8, 4, 128, 6, 4),
    "kept heads of Gemma-2-2B in 8 bits": (4, 2, 256, 8, 8),
    "kept heads of SmolLM2-135M in 16 bits": (3, 3, 64, 16, 16),
    "kept heads of Llama-3.1-8B in 16 and 8 bits": (8, 4, 128, 16, 8),
    "kept heads of Gemma-2-2B in 16 bits": (4, 2, 256, 16, 16),
}
ROUNDED = {  # P, bits
    "rows of SmolLM2-135M in 8 bits": (64, 8),
    "rows of Llama-3.1-8B in 6 bits": (128, 6),
    "rows of Llama-3.1-8B in 4 bits": (128, 4),
    "rows of Phi-2 in 2 bits": (80, 2),
    "rows of Gemma-2-2B in 8 bits": (256, 8),
}
PROMPTS = {  # K, R, P, planes, dtype
    "prompts of SmolLM2-135M": (3, 3, 64, 32, "bf16"),
    "prompts of Llama-3.1-8B": (8, 4, 128, 64, "bf16"),
    "prompts of Gemma-2-2B": (4, 2, 256, 128, "bf16"),
    "prompts of Phi-2": (32, 1, 80, 16, "fp32"),
}


def tools() -> Path:
    """Where the wheel of triton has NVIDIA's ptxas and cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def bits_of(dtype: str, dim: int) -> dict[str, int]:
    """The constants that say how keys and values are rounded."""
    bits = ROWS.get(dtype, 16)
    groups = Rounding(bits, dim).groups
    return {"KEY_BITS": bits, "VALUE_BITS": bits, "KEY_GROUPS": groups, "VALUE_GROUPS": groups}


def compiled(capability: int, shape: str) -> dict[str, int]:
    """Registers of a thread; bytes of its stack and of spilled registers; bytes shared by a block's warps."""
    import modeling_llamba.kernels.triton.triton_step as kernels

    function = kernels.mix_one_kernel
    K, R, P, planes, dtype = SHAPES[shape]
    slow = planes // 2
    N = P - 2 * (planes - slow)
    (dims, columns), slow_columns = kernels.tile_of(P, HELD["S"] + HELD["C"]), kernels.tile_of(P, N)[1]
    types = dict.fromkeys(function.arg_names, f"*{'bf16' if dtype in ROWS else dtype}")
    width = P
    if dtype in ROWS:
        types |= {"keys": "*u8", "values": "*u8"}
        width = Rounding(ROWS[dtype], P).width(torch.bfloat16)
    types |= {"salience": "*fp32", "state": "*fp32", "seen": "*i64", "scale": "fp32", "softcap": "fp32"}
    constants = {"K": K, "R": R, "P": P, "N": N} | bits_of(dtype, P) | {"PART": P & -P}
    constants |= {"KEY_WIDTH": width, "VALUE_WIDTH": width, "PLANES": planes, "SLOW_PLANES": slow} | HELD
    constants |= {"DIMS": dims, "COLUMNS": columns, "SLOW": slow_columns}
    types |= dict.fromkeys(constants, "constexpr")
    return resources(function, types, constants, capability, kernels.WARPS)


def compiled_write(capability: int, shape: str) -> dict[str, dict[str, int]]:
    """`compiled` for the two kernels that write a token."""
    import modeling_llamba.kernels.triton.triton_step as kernels

    K, _, P, planes, dtype = SHAPES[shape]
    slow = planes // 2
    N = P - 2 * (planes - slow)
    (dims, slow_columns), rounding = kernels.tile_of(P, N), Rounding(ROWS.get(dtype, 16), P)
    width, pointer = (rounding.width(torch.bfloat16), "*u8") if dtype in ROWS else (P, f"*{dtype}")
    held = {"S": 20, "C": 256, "E": 32, "CANDIDATES": 64}
    part = 2 ** (width - 1).bit_length()
    write = {"K": K, "P": P, "N": N, "KEY_WIDTH": width, "VALUE_WIDTH": width, "KEY_PART": part, "VALUE_PART": part}
    write |= bits_of(dtype, P)
    write |= {"PART": P & -P, "PLANES": planes, "SLOW_PLANES": slow, "DIMS": dims, "SLOW": max(slow_columns, 16)}
    write |= {"ROWS": kernels.ROWS} | held
    of_type = dict.fromkeys(("keys", "values", "new_keys", "new_values"), pointer)
    of_type |= dict.fromkeys(("salience", "new_salience", "state"), "*fp32") | {"index": "*i64", "seen": "*i64"}
    found = {}
    for name, sizes, warps in (("write", write, kernels.WARPS), ("note", held | {"WINDOW": 256}, 4)):
        function = getattr(kernels, f"{name}_kernel")
        found[name] = resources(function, of_type | dict.fromkeys(sizes, "constexpr"), sizes, capability, warps)
    return found


def compiled_kept(capability: int, shape: str) -> dict[str, dict[str, int]]:
    """`compiled` for attention of kept heads, to rows and to rows in pages."""
    import modeling_llamba.kernels.triton.triton_rows as kernels
    from modeling_llamba.kernels.triton.triton_step import tile_of

    function = kernels.attend_kernel
    K, R, P, key_bits, value_bits = KEPT[shape]
    keys, values = Rounding(key_bits, P), Rounding(value_bits, P)
    dims, tile = tile_of(P, 4096)
    constants = {"K": K, "R": R, "P": P, "PART": P & -P if keys.rounds else 1}
    widths = [each.width(torch.bfloat16) if each.rounds else P for each in (keys, values)]
    constants |= {"KEY_BITS": key_bits, "VALUE_BITS": value_bits}
    constants |= {"KEY_GROUPS": keys.groups, "VALUE_GROUPS": values.groups}
    constants |= {"DIMS": dims, "COLUMNS": min(tile, kernels.SPAN)}
    types = dict.fromkeys(function.arg_names, "i32")
    of_keys, of_values = ("*u8" if each.rounds else "*bf16" for each in (keys, values))
    types |= {"query": "*bf16", "keys": of_keys, "values": of_values, "bias": "*fp32"}
    types |= {"part_output": "*fp32", "part_mass": "*fp32", "scale": "fp32", "softcap": "fp32"}
    types |= {"table": "*i32", "lengths": "*i64"}
    found = {}
    for where, in_pages in (("rows", False), ("pages", True)):
        tokens = [width * (K if in_pages else 1) for width in widths]
        own = constants | {"KEY_TOKEN": tokens[0], "VALUE_TOKEN": tokens[1], "PAGED": in_pages, "BIAS": not in_pages}
        found[where] = resources(function, types | dict.fromkeys(own, "constexpr"), own, capability, kernels.WARPS)
    return found


def compiled_prompt(capability: int, shape: str) -> dict[str, dict[str, int]]:
    """`compiled` for each kernel of a prompt."""
    import modeling_llamba.kernels.triton.triton_columns as columns
    import modeling_llamba.kernels.triton.triton_prompt as kernels
    import modeling_llamba.kernels.triton.triton_tokens as tokens

    K, R, P, planes, dtype = PROMPTS[shape]
    slow = planes // 2
    N = P - 2 * (planes - slow)
    slice_dims, slow_dims = kernels.slice_of(P, N)
    part = kernels.padded(P)
    rounding = Rounding(8, P)
    state = {"K": K, "P": P, "N": N, "PLANES": planes, "SLOW_PLANES": slow, "PER_CHUNK": 16}
    state |= {"SLICE": slice_dims, "SLOW": slow_dims}
    constants = {
        "rotate": {
            "RANKS": True,
            "HAS_WEIGHT": True,
            "H": K * R,
            "K": K,
            "P": P,
            "HALF": planes,
            "WIDTH": K * R * P,
            "DIMS": part,
            "ROWS": tokens.TILE // part,
        },
        "lay": {
            "HAS_PAST": True,
            "BATCH": 1,
            "K": K,
            "H": K * R,
            "S": 20,
            "KEY_WIDTH": rounding.width(torch.bfloat16),
            "VALUE_WIDTH": P,
            "KEY_BITS": 8,
            "VALUE_BITS": 16,
            "KEY_GROUPS": 1,
            "VALUE_GROUPS": 1,
            "P": P,
            "PART": P & -P,
            "DIMS": part,
            "ROWS": columns.LAY_TILE // part,
        },
        "leave": {"S": 20, "E": 16, "CANDIDATES": 32, "TILE": columns.TILE},
        "place": {"S": 20, "CANDIDATES": 512},
        "hold": {
            "K": K,
            "S": 20,
            "KEY_WIDTH": P,
            "VALUE_WIDTH": P,
            "KEY_PART": part,
            "VALUE_PART": part,
            "TILE": columns.HOLD_COLUMNS,
        },
        "mask": {"TILE": columns.TILE, "TILES": columns.MASK_TILES},
        "sum": {"HAS_STATE": True, "ROWS": kernels.SUM_ROWS} | state,
        "mix": {"FEATURES": True, "R": R, "E": 16, "DIMS": kernels.padded(P), "ROWS": 16} | state,
    }
    models = ("query", "near", "keys", "values", "mass", "output", "features", "new_query", "new_key", "key")
    models = *models, "cos", "sin", "hidden_states", "weight"
    of_type = dict.fromkeys((*models, "past_keys", "past_values", "new_keys", "new_values"), f"*{dtype}")
    of_type |= dict.fromkeys(
        ("past_salience", "new_salience", "salience", "log_mass", "sums", "state", "final", "ranks"), "*fp32"
    ) | {"scale": "fp32"}
    of_type |= dict.fromkeys(("until", "numbers", "indices", "bounds"), "*i32")
    of_type |= dict.fromkeys(("order", "places", "index"), "*i64")
    found = {}
    for name, sizes in constants.items():
        modules = {"sum": kernels, "mix": kernels, "rotate": tokens}
        function = getattr(modules.get(name, columns), f"{name}_kernel")
        types = dict.fromkeys(function.arg_names, "i32") | of_type
        if name == "lay":
            types |= dict.fromkeys(("past_keys", "new_keys"), "*u8")
        types |= dict.fromkeys(sizes, "constexpr")
        found[name] = resources(function, types, sizes, capability, kernels.warps_of(slow_dims))
    return found


def compiled_rounding(capability: int, shape: str, decodes: bool) -> dict[str, int]:
    """`compiled` for rows of vectors, or for vectors of rows."""
    import modeling_llamba.kernels.triton.triton_rounding as kernels

    function = kernels.decode_kernel if decodes else kernels.encode_kernel
    P, bits = ROUNDED[shape]
    constants = dict(kernels.sizes_of(bits, P, Rounding(bits, P).groups))
    if decodes:
        constants["ROTATED"] = False
    types = dict.fromkeys(function.arg_names, "i32") | {"vectors": "*bf16", "rows": "*u8"}
    types |= {} if decodes else {"other": "*bf16", "other_rows": "*u8"}
    types |= dict.fromkeys(constants, "constexpr")
    return resources(function, types, constants, capability, kernels.WARPS)


def resources(
    function, types: dict[str, str], constants: dict[str, int], capability: int, warps: int
) -> dict[str, int]:
    """What a compiled kernel takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(function, {name: types[name] for name in function.arg_names}, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tools() / "cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, spilled = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + spilled, "shared": kernel.metadata.shared}


if __name__ == "__main__":
    found = {}
    for capability in CAPABILITIES:
        found |= {f"sm_{capability}, {shape}": compiled(capability, shape) for shape in SHAPES}
        for compile_all, shapes in ((compiled_kept, KEPT), (compiled_write, SHAPES), (compiled_prompt, PROMPTS)):
            for shape in shapes:
                of_kernels = compile_all(capability, shape)
                found |= {f"sm_{capability}, {shape}, {name}": taken for name, taken in of_kernels.items()}
        for part, decodes in (("into", False), ("out of", True)):
            of_part = {shape: compiled_rounding(capability, shape, decodes) for shape in ROUNDED}
            found |= {f"sm_{capability}, {part} {shape}": takes for shape, takes in of_part.items()}
    json.dump(found, sys.stdout)
