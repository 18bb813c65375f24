"""Llamba and PhiMamba in vLLM, by its own entry point: `vllm serve HYBRID`, without the checkpoint's remote code.

vllm_model.py is the model as vLLM drives it, slots.py keeps what a layer carries from step to step in vLLM's cache.
The layers themselves are those of `modeling_llamba`.
"""

SLOTS_OPERATOR = "vllm::hybrid_slots"
"""Operator that slots.py registers: a layer that reads and writes slots. A CUDA graph may hold it in some steps."""


def register() -> None:
    """Make the two families known to vLLM; named in pyproject.toml, called in each of its processes."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig

    import modeling_llamba  # noqa: F401
    import modeling_phimamba  # noqa: F401

    for name in ("LlambaForCausalLM", "PhiMambaForCausalLM"):
        ModelRegistry.register_model(name, "recipes.serving.vllm_model:ServedHybrid")
    if SLOTS_OPERATOR not in CompilationConfig._attention_ops:  # where vLLM cuts graphs of other steps
        CompilationConfig._attention_ops.append(SLOTS_OPERATOR)
