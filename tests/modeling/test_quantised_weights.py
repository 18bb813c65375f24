"""Weights that torchao, quanto, HQQ or bitsandbytes hold in 8 bits, beside a cache of 16 and of 8 bits.

`make test-slow` installs these libraries in a folder of their own, since transformers imports them wherever they are
found, which takes seconds and prints warnings.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from tests.helpers.hybrids import make_hybrid
from tests.helpers.teachers import random_ids

GREEDY = dict(do_sample=False, eos_token_id=None)


def load_torchao(folder, student):
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def load_quanto(folder, student):
    pytest.importorskip("optimum.quanto")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantoConfig(weights="int8"))


def load_hqq(folder, student):
    """Quantise with the library itself, since transformers 5.23 loads nothing with HqqConfig."""
    hqq = pytest.importorskip("hqq.core.quantize")
    hqq.HQQLinear.set_backend(hqq.HQQBackend.PYTORCH)
    group = 16  # numbers that share a scale; the tiny layers have no multiple of HQQ's 64
    settings = hqq.BaseQuantizeConfig(nbits=8, group_size=group, axis=1)
    quantised = copy.deepcopy(student)
    for name, module in student.model.named_modules():
        if type(module) is nn.Linear and module.weight.numel() % group == 0:
            module = hqq.HQQLinear(copy.deepcopy(module), settings, compute_dtype=torch.float32, device="cpu")
            quantised.model.set_submodule(name, module)
    return quantised


def load_bitsandbytes(folder, student):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


def unpacked_weight(module):
    """The weight that a quantised module computes with; None for a module that is not quantised."""
    if type(module).__name__ == "HQQLinear":
        return module.dequantize()
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Linear8bitLt":
        return weight.CB * weight.SCB[:, None] / 127
    if hasattr(weight, "dequantize") and type(weight) is not nn.Parameter:
        return weight.dequantize()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("pattern", ["beside", "shared", "every", "attention"])
@pytest.mark.parametrize("quantise", [load_torchao, load_quanto, load_hqq, load_bitsandbytes])
@torch.no_grad()
def test_quantised_weights_beside_a_cache_in_few_bits(quantise, pattern, bits, tmp_path):
    """Weights in 8 bits: the same as these weights unpacked, by steps as in one pass."""
    student = make_hybrid(pattern=pattern, dtype=torch.float32, window_bits=bits, full_attention_bits=bits)
    student.save_pretrained(tmp_path)
    quantised = quantise(tmp_path, student)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantised_layers = 0
    for name, module in quantised.named_modules():
        weight = unpacked_weight(module)
        if weight is not None:
            plain.get_submodule(name).weight.copy_(weight)
            quantised_layers += 1
    assert quantised_layers >= 4 * len(student.model.layers)

    ids = random_ids(2, 40)
    whole = quantised(ids).logits
    expected = plain(ids).logits
    cache = None
    parts = []
    for part in ids.split([20, 1, 1, 18], dim=1):
        output = quantised(part, cache=cache, use_cache=True)
        cache = output.cache
        parts.append(output.logits)
    by_steps = torch.cat(parts, 1)
    generated = quantised.generate(ids, max_new_tokens=5, **GREEDY)

    if quantise is load_bitsandbytes:
        # it rounds the inputs of each product to 8 bits, too, so that other tokens may be the salient ones
        limit = 0.15 if student.config.hybrid_salient else 0.05
        assert (whole - expected).norm() < limit * expected.norm()
        assert (by_steps - whole).norm() < 0.05 * whole.norm()
        assert generated.shape == (2, 45)
        return
    # a product that differs in its last digit may round a key to the next code
    assert (whole - expected).norm() < (1e-5 if bits == 16 else 5e-3) * expected.norm()
    tolerance = 1e-4 if bits == 16 else 5e-3
    torch.testing.assert_close(by_steps, whole, rtol=tolerance, atol=tolerance)
    assert torch.equal(generated, plain.generate(ids, max_new_tokens=5, **GREEDY))
