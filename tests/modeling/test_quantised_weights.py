"""Weights that torchao holds in 8 bits, beside a cache of 16 and of 8 bits.

`make test-slow` installs torchao in a folder of its own, since transformers imports it wherever it is found, which
takes seconds and prints warnings.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.helpers.students import make_student
from tests.helpers.teachers import random_ids

GREEDY = dict(do_sample=False, eos_token_id=None)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("pattern", ["beside", "shared", "every", "attention"])
@torch.no_grad()
def test_quantised_weights_beside_a_cache_in_few_bits(pattern, bits, tmp_path):
    """torchao's weights in 8 bits: the same as these weights unpacked, by steps as in one pass."""
    quantization = pytest.importorskip("torchao.quantization")
    student = make_student(pattern=pattern, dtype=torch.float32, window_bits=bits, full_attention_bits=bits)
    student.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    )
    quantised_layers = 0
    for name, module in quantised.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "dequantize"):
            plain.get_submodule(name).weight.copy_(weight.dequantize())
            quantised_layers += type(weight) is not torch.nn.Parameter
    assert quantised_layers >= 4 * len(student.model.layers)
    ids = random_ids(2, 40)
    whole = quantised(ids).logits
    expected = plain(ids).logits
    # a product that differs in its last digit may round a key to the next code
    assert (whole - expected).norm() < (1e-5 if bits == 16 else 5e-3) * expected.norm()
    cache = None
    parts = []
    for part in ids.split([20, 1, 1, 18], dim=1):
        output = quantised(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    generated = quantised.generate(ids, max_new_tokens=5, **GREEDY)
    assert torch.equal(generated, plain.generate(ids, max_new_tokens=5, **GREEDY))
