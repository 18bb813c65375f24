"""A plugin of pytest (`-p tests.vllm.model_runner_v2`): vLLM's second model runner, which GPUs have, on a CPU.

It launches Triton's kernels, and vLLM wants Triton's backend for CPUs, of which there is no wheel; where a CPU has no
other way to compute them, Triton's interpreter does, which the wheel for GPUs brings.
"""

import os
import types

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton.backends import backends  # noqa: E402  reads the setting

backends.setdefault("cpu", types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True), compiler=None))
