"""Training: gradients, checkpointing, autocast, PEFT, TRL."""

import pytest
import torch

from modeling_llamba import LlambaForCausalLM
from tests.helpers.hybrids import FAMILIES, MIXERS, make_hybrid
from tests.helpers.teachers import random_ids
from tests.helpers.tokenizers import tokenizer

every_mixer = pytest.mark.parametrize("mixer", MIXERS)
MIXERS_AND_BESIDE = [*((mixer, "hybrid") for mixer in MIXERS), ("discrete_mamba2", "beside")]
every_family = pytest.mark.parametrize("family", FAMILIES)


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@every_family
@pytest.mark.parametrize("mixer, pattern", MIXERS_AND_BESIDE)
def test_every_parameter_gets_a_gradient_and_the_loss_falls(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern, dtype=torch.float32).train()
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
@pytest.mark.parametrize("mixer, pattern", [*MIXERS_AND_BESIDE, ("none", "beside-only")])
def test_gradient_checkpointing_changes_nothing(family, mixer, pattern):
    model = make_hybrid(family, mixer, pattern).train()
    ids = random_ids(2, 20)
    loss, plain = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed_loss, checkpointed = gradients(model, ids)
    torch.testing.assert_close(checkpointed_loss, loss)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient)


@every_mixer
def test_loss_is_the_shifted_cross_entropy_over_labelled_tokens(mixer):
    model = make_hybrid(mixer=mixer)
    ids = random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    out = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)


@every_family
@every_mixer
def test_lora_on_the_projections(family, mixer):
    from peft import LoraConfig, get_peft_model

    model = make_hybrid(family, mixer)
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
            out = merged(token, cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), changed, rtol=1e-4, atol=1e-5)


def test_lora_on_a_hybrid_layer():
    from peft import LoraConfig, get_peft_model

    model, ids = make_hybrid(pattern="beside-only"), random_ids(2, 24)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down", "up"], init_lora_weights=False)
    adapted = get_peft_model(model, lora).eval()
    adapted(ids, labels=ids).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 4
    assert all("lora" in name and p.grad.any() for name, p in trained.items())
    logits = adapted(ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, logits)


PROMPTED = [("llamba", "beside-only"), ("llamba", "pure"), ("llamba", "every"), ("phimamba", "pure")]


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("family, pattern", PROMPTED)
def test_prompt_tuning(family, pattern, method):
    """Learned embeddings before the tokens: in training, in decoding, and before a prompt that is padded."""
    import peft

    model, ids = make_hybrid(family, pattern=pattern, dtype=torch.float32), random_ids(2, 20)
    tuned = peft.get_peft_model(model, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    tuned(ids, labels=ids).loss.backward()
    trained = {name for name, p in tuned.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained
    assert all(name.startswith("prompt_encoder") for name in trained)
    for first in (0, 5):  # tokens of padding in the first row
        mask = torch.ones_like(ids)
        mask[0, :first] = 0
        options = dict(max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True, output_logits=True)
        drawn = tuned.generate(input_ids=ids, attention_mask=mask, do_sample=False, **options)
        for i, logits in enumerate(drawn.logits):
            embedded = model.get_input_embeddings()(drawn.sequences[:, : 20 + i])
            seen = torch.cat([torch.ones(2, 3), mask, torch.ones(2, i)], 1)
            whole = model(inputs_embeds=torch.cat([tuned.get_prompt(2), embedded], 1), attention_mask=seen)
            torch.testing.assert_close(logits, whole.logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pattern", ["beside-only", "pure", "hybrid"])
def test_prefix_tuning_is_refused_with_what_works(pattern):
    """A state or a window has no place for keys without tokens."""
    from peft import PrefixTuningConfig, get_peft_model

    model, ids = make_hybrid(pattern=pattern, dtype=torch.float32), random_ids(1, 9)
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for use in (tuned, lambda ids: tuned.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"prefix tuning\); prompt tuning and LoRA work"):
            use(ids)


def test_lora_on_the_convolution_fails_loudly():
    """The adapter would see neither the cached inputs nor the packing."""
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(make_hybrid(), LoraConfig(r=4, target_modules=["conv1d"]))


@pytest.mark.parametrize("family, packing", [("llamba", False), ("phimamba", True)])
def test_trl_sft(family, packing, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = make_hybrid(family, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
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
    assert not [name for name, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[name])]


@every_family
@pytest.mark.parametrize("mixer, pattern", MIXERS_AND_BESIDE)
def test_autocast_trains_and_keeps_the_recurrence_in_float32(family, mixer, pattern):
    """bf16 autocast is how every trainer runs: the scan must neither fail nor lose its precision."""
    model = make_hybrid(family, mixer, pattern, dtype=torch.float32).train()
    ids = random_ids(2, 40)
    loss, plain = gradients(model, ids)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    first = out.cache.layers[0]
    state = first.held.state if pattern == "beside" else first.recurrent_states[0]
    assert state.dtype == torch.float32
    assert abs(out.loss.item() - loss.item()) < 0.05 * loss.item()
    assert len(plain) > 10
    parameters = dict(model.named_parameters())
    for name in plain:
        gradient = parameters[name].grad.float()
        assert gradient.isfinite().all(), name
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), plain[name].flatten(), dim=0) > 0.9, name


def test_what_gets_no_gradient_is_fixed_after_loading(tmp_path):
    """A parallel training waits for the gradient of every parameter that wants one."""
    make_hybrid(pattern="beside", dtype=torch.float32).save_pretrained(tmp_path)
    model = LlambaForCausalLM.from_pretrained(tmp_path).train()
    assert not [n for n, p in model.named_parameters() if n.endswith("salience") and p.requires_grad]
    ids = random_ids(2, 30)
    model(ids, labels=ids).loss.backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
