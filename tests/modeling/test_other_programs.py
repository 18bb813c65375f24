"""Ways in which other people's programs use a model: caches made by hand, scores, attentions, LongRoPE."""

import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import (
    AutoModelForSequenceClassification,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from modeling_llamba.model.cache import MixerLayer, cache_length
from tests.helpers.hybrids import make_hybrid
from tests.helpers.padding import left_padded
from tests.helpers.teachers import random_ids
from tests.helpers.tiny_chat import chat_tokenizer
from tests.helpers.tokenizers import tokenizer

PATTERNS = ["beside", "beside-only", "shared", "every", "pure"]
GREEDY = dict(do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("pattern", [*PATTERNS, "attention", "window"])
@torch.no_grad()
def test_a_dynamic_cache_made_by_hand(pattern, configured):
    """Without a configuration, as many programs make it, and with one, for passes and for generation."""
    model, ids = make_hybrid(pattern=pattern), random_ids(2, 30)
    config = model.config if configured else None
    cache = DynamicCache(config=config)
    parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split([20, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)
    assert cache_length(cache) == 30
    expected = model.generate(ids, max_new_tokens=6, **GREEDY)
    made = model.generate(ids, max_new_tokens=6, cache=DynamicCache(config=config), **GREEDY)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("pattern", ["beside", "pure", "attention"])
def test_caches_of_other_kinds_are_refused(pattern):
    model, ids = make_hybrid(pattern=pattern), random_ids(1, 5)
    of_two = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="must be a DynamicCache or a StaticCache, not EncoderDecoderCache"):
            call(ids, cache=of_two)
    with pytest.raises(ValueError, match="not tuple"):
        model(ids, cache=((torch.zeros(1), torch.zeros(1)),))
    if pattern == "pure":
        with pytest.raises(ValueError, match="StaticCache cannot count tokens"):
            model.generate(ids, cache=StaticCache(config=model.config, max_cache_len=9))


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_rows_of_a_cache_are_selected_and_repeated(pattern):
    model, ids = make_hybrid(pattern=pattern), random_ids(3, 24)
    one = model(ids[:, :20], use_cache=True).cache
    one.batch_select_indices(torch.tensor([2, 0]))
    one.batch_repeat_interleave(2)
    rows = ids[[2, 2, 0, 0]]
    torch.testing.assert_close(model(rows[:, 20:], cache=one).logits, model(rows).logits[:, 20:])


def test_nothing_to_select_before_the_first_token():
    layer = MixerLayer()
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    assert layer.conv_states[0] is None
    assert layer.recurrent_states[0] is None


def test_attentions_that_are_left_out_are_said(caplog):
    """Once, however many passes there are."""
    ids, mixed = random_ids(1, 12), make_hybrid(pattern="every", attn_implementation="eager")
    logging.warning_once.cache_clear()
    for _ in range(2):
        found = mixed(ids, output_attentions=True).attentions
        assert len(found) == 1
        assert found[0].shape[-2:] == (12, 12)
    assert sum("2 of 3 layers are mixers or hybrid layers" in message for message in caplog.messages) == 1
    with pytest.raises(ValueError, match="no layer of this model has a matrix of attention probabilities"):
        make_hybrid(pattern="beside-only")(ids, output_attentions=True)


@pytest.mark.parametrize("family, pattern", [("llamba", "every"), ("phimamba", "beside")])
def test_smoothed_labels_are_those_of_the_next_tokens(family, pattern, tmp_path):
    """transformers' Trainer shifts them for the classes that it knows by name."""
    model, ids = make_hybrid(family, pattern=pattern), random_ids(2, 12)
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    found = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(found, LabelSmoother(0.1)(model(ids), ids, shift_labels=True))


CLEAN_PROCESS = """
import sys, torch
from transformers import AutoModelForSequenceClassification
for folder in sys.argv[1:]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    torch.save(model(torch.load(f"{folder}/ids.pt")).logits, f"{folder}/scores.pt")
assert not any(name.startswith("modeling_llamba") for name in sys.modules)
"""


def test_reward_models_are_trained_saved_and_loaded(tmp_path):
    """By TRL, from a hybrid's folder: the body is the hybrid's, the head is new; in a clean process as well."""
    expected = {
        tmp_path / family: trained_reward_model(family, pattern, tmp_path / family)
        for family, pattern in (("llamba", "every"), ("phimamba", "beside"))
    }
    command = [sys.executable, "-c", CLEAN_PROCESS, *(str(folder / "reward") for folder in expected)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    for folder, logits in expected.items():
        torch.testing.assert_close(torch.load(folder / "reward" / "scores.pt"), logits)


def trained_reward_model(family, pattern, folder):
    """Train a reward model and save it to folder / "reward", with ids in ids.pt; return their scores."""
    hybrid = make_hybrid(family, pattern=pattern, dtype=torch.float32, pad_token_id=0)
    hybrid.save_pretrained(folder / "hybrid")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "hybrid", num_labels=1)
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, hybrid.model.get_parameter(name)), name
    rows = [{"chosen": f"w5 w{i} w9", "rejected": f"w5 w{i} w8 w7"} for i in range(10, 18)]
    arguments = RewardConfig(
        output_dir=str(folder / "work"), max_steps=2, per_device_train_batch_size=2, report_to="none", bf16=False,
        use_cpu=True, save_strategy="no", learning_rate=1e-2, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = RewardTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    model.eval().save_pretrained(folder / "reward")
    ids = random_ids(2, 9) % 100 + 10
    with torch.no_grad():
        expected = model(ids).logits
        padded, mask = left_padded(ids, 3)
        right = torch.nn.functional.pad(ids, (0, 3)), torch.nn.functional.pad(torch.ones_like(ids), (0, 3))
        for batch, of_batch in ((padded, mask), right):
            torch.testing.assert_close(model(batch, attention_mask=of_batch).logits, expected)
    torch.save(ids, folder / "reward" / "ids.pt")
    return expected


def test_few_bits_need_no_flag(tmp_path):
    """A pipeline, lm-eval and TRL round keys and values as the checkpoint's configuration says."""
    bits = dict(window_bits=[6, 4], full_attention_bits=[4, 2])
    model = make_hybrid(pattern="beside-only", dtype=torch.float32, head_dim=16, pad_token_id=0, **bits)
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    ids = random_ids(1, 40)
    words = [f"w{i}" for i in ids[0].tolist()]
    text = " ".join(words)
    logits = model(ids).logits
    whole = make_hybrid(pattern="beside-only", dtype=torch.float32, head_dim=16)(ids).logits
    assert (logits - whole).abs().max() > 1e-2

    generated = pipeline("text-generation", model=str(tmp_path), device="cpu")(
        text, max_new_tokens=5, return_tensors=True, **GREEDY
    )
    expected = model.generate(ids, max_new_tokens=5, **GREEDY)[0, ids.shape[1] :]
    assert generated[0]["generated_token_ids"][-5:] == expected.tolist()

    harness = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=1)
    asked = Instance("loglikelihood", {}, (" ".join(words[:-3]), " " + " ".join(words[-3:])), 0)
    ((found, _),) = harness.loglikelihood([asked], disable_tqdm=True)
    scores = logits[0, -4:-1].log_softmax(-1).gather(-1, ids[0, -3:, None]).sum()
    assert found == pytest.approx(scores.item(), abs=1e-4)

    arguments = SFTConfig(
        output_dir=str(tmp_path / "sft"), max_steps=1, per_device_train_batch_size=1, report_to="none", bf16=False,
        use_cpu=True, save_strategy="no", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(str(tmp_path), args=arguments, train_dataset=Dataset.from_list([{"text": text}]))
    trainer.train()
    learned = torch.cat([ids, torch.tensor([[2]])], dim=1)  # TRL ends a text
    loss = model(learned, labels=learned).loss.item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=2e-4)
