"""Training: checkpointing, compilation, export, PEFT, TRL."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from tests.students import FAMILIES, MIXERS, make_student
from tests.teachers import random_ids

every_mixer = pytest.mark.parametrize("mixer", MIXERS)
MIXERS_AND_BESIDE = [*((mixer, "hybrid") for mixer in MIXERS), ("discrete_mamba2", "beside")]
every_family = pytest.mark.parametrize("family", FAMILIES)


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@every_family
@every_mixer
def test_every_parameter_gets_a_gradient_and_the_loss_falls(family, mixer):
    model = make_student(family, mixer, dtype=torch.float32).train()
    ids = random_ids(4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss, grads = gradients(model, ids)
        losses.append(loss.item())
        assert all(g.isfinite().all() for g in grads.values())
        assert not [name for name, g in grads.items() if not g.any()]
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2


@every_family
@pytest.mark.parametrize("mixer, pattern", [*MIXERS_AND_BESIDE, ("none", "beside-only"), ("mamba2", "normalised")])
def test_gradient_checkpointing_changes_nothing(family, mixer, pattern):
    model = make_student(family, mixer, pattern).train()
    ids = random_ids(2, 20)
    loss, plain = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed_loss, checkpointed = gradients(model, ids)
    torch.testing.assert_close(checkpointed_loss, loss)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient)


@every_mixer
def test_loss_is_the_shifted_cross_entropy_over_labelled_tokens(mixer):
    model = make_student(mixer=mixer)
    ids = random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)


ONE_LAYER = dict(num_hidden_layers=1, layer_types=["linear_attention"], hybrid_full_heads=None)


@pytest.mark.parametrize("family, options", [("phimamba", ONE_LAYER), ("llamba", dict(pattern="every"))])
def test_compiled_forward_and_backward(family, options):
    """The whole graph, without breaks; the inductor backend is left to `make test-slow`."""
    torch.compiler.reset()
    model = make_student(family, **options)
    ids = random_ids(2, 20)
    loss, plain = gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled_loss = compiled(ids, labels=ids, use_cache=False).loss
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss.detach(), loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@every_mixer
def test_inductor(mixer):
    torch.compiler.reset()
    model = make_student(mixer=mixer, dtype=torch.float32)
    ids = random_ids(2, 20)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
        torch.testing.assert_close(compiled, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_graph_of_any_number_of_sequences():
    """Of which eager mode would take shorter chunks for some."""
    model, ids = make_student(dtype=torch.float32, mixer_chunk_size=64), random_ids(2, 40)
    shapes = {"input_ids": {0: torch.export.Dim("batch", min=2, max=64)}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    other = random_ids(40, 40, seed=5)
    torch.testing.assert_close(program.module()(input_ids=other, use_cache=False).logits, model(other).logits)


@pytest.mark.parametrize(
    "family, mixer", [("llamba", "mamba1"), ("phimamba", "mamba2"), ("llamba", "discrete_mamba2")]
)
@torch.no_grad()
def test_export(family, mixer):
    model = make_student(family, mixer)
    ids = random_ids(2, 20)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    other = random_ids(2, 20, seed=5)
    torch.testing.assert_close(program.module()(input_ids=other, use_cache=False).logits, model(other).logits)


@every_family
@every_mixer
def test_lora_on_the_projections(family, mixer):
    from peft import LoraConfig, get_peft_model

    model = make_student(family, mixer)
    ids = random_ids(2, 12)
    base = model(ids).logits.detach()
    config = LoraConfig(
        r=4, target_modules=["in_proj", "out_proj", "q_proj"], modules_to_save=["conv1d"], init_lora_weights=False
    )
    model = get_peft_model(model, config)
    changed = model(ids).logits
    assert (changed - base).abs().max() > 1e-3
    changed.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n in trained)
    assert {n.split(".mixer.")[1].split(".")[0] for n in trained if ".mixer." in n} == {
        "in_proj",
        "out_proj",
        "conv1d",
    }
    with torch.no_grad():
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, changed, rtol=1e-4, atol=1e-5)
        # one token at a time takes another path through the mixer; the adapter must be on it, too
        cache, steps = None, []
        for token in ids.split(1, dim=1):
            out = merged(token, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), changed, rtol=1e-4, atol=1e-5)


def test_lora_on_the_convolution_fails_loudly():
    """The adapter would see neither the cached inputs nor the packing."""
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(make_student(), LoraConfig(r=4, target_modules=["conv1d"]))


@pytest.mark.parametrize("family, packing", [("llamba", False), ("phimamba", True)])
def test_trl_sft(family, packing, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = make_student(family, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{"input_ids": random_ids(1, n, seed=n)[0].tolist()} for n in (5, 9, 12, 7, 11, 20)]
    arguments = SFTConfig(
        output_dir=tmp_path,
        max_length=24,
        packing=packing,
        padding_free=packing,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-3,
        report_to="none",
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": False},
    )
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    assert torch.tensor([log["loss"] for log in trainer.state.log_history if "loss" in log]).isfinite().all()
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", bos_token="w1", eos_token="w2")


@every_family
@pytest.mark.parametrize("mixer, pattern", MIXERS_AND_BESIDE)
def test_autocast_trains_and_keeps_the_recurrence_in_float32(family, mixer, pattern):
    """bf16 autocast is how every trainer runs: the scan must neither fail nor lose its precision."""
    model = make_student(family, mixer, pattern, dtype=torch.float32).train()
    ids = random_ids(2, 40)
    loss, plain = gradients(model, ids)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    assert out.past_key_values.layers[0].recurrent_states[0].dtype == torch.float32
    assert abs(out.loss.item() - loss.item()) < 0.05 * loss.item()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        assert (
            gradient.isfinite().all()
            and torch.nn.functional.cosine_similarity(gradient.flatten(), plain[name].flatten(), dim=0) > 0.9
        ), name


@pytest.mark.parametrize(
    "pattern, cached, graphs", [("hybrid", StaticCache, 1), ("hybrid", None, 2), ("normalised", None, 2)]
)
@torch.no_grad()
def test_compiled_decoding_steps(pattern, cached, graphs):
    """Without a break: one graph with a static cache, else a second for any number of tokens that went before."""
    torch.compiler.reset()
    model, ids = make_student("phimamba", pattern=pattern), random_ids(1, 26)
    cache = None if cached is None else cached(config=model.config, max_cache_len=32)
    cache = model(ids[:, :20], past_key_values=cache, use_cache=True).past_key_values
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for t in range(20, 26):
        step = compiled(ids[:, t : t + 1], past_key_values=cache, position_ids=torch.tensor([[t]]), use_cache=True)
        torch.testing.assert_close(step.logits[:, 0], model(ids[:, : t + 1]).logits[:, -1], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == graphs
