"""The yardstick, and the ladder that uses it, on a tiny teacher."""

import json
import math

import pytest
import torch

from recipes.evaluation.fidelity import Yardstick, common_prefix, repetition, summary, text_rows
from tests.alignment.tiny import teacher_model
from tests.modeling.test_training import tokenizer
from tests.teachers import make_teacher, random_ids

CHAT = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"


@pytest.fixture
def folder(tmp_path):
    """A teacher whose tokenizer knows chats, and a text."""
    make_teacher("llama-gqa").save_pretrained(tmp_path / "teacher")
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(tmp_path / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 150)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return tmp_path


def yardstick(folder):
    words = tokenizer()
    words.chat_template = CHAT
    model = teacher_model(folder / "teacher")
    return model, Yardstick(model.whole(), words, random_ids(3, 64), random_ids(1, 512), new_tokens=6, copied=10)


def test_the_teacher_measures_perfect(folder):
    model, stick = yardstick(folder)
    figures = stick.measure(Yardstick.final_hidden(model.whole()), model.whole())
    assert figures["kl"] == pytest.approx(0, abs=1e-6) and figures["top1"] == 1
    assert figures["perplexity_ratio"] == figures["greedy_agreement"] == 1
    assert figures["copy"] == stick.teacher["copy"] and "by position 0-256" in summary(figures)


def test_figures_are_those_of_the_logits(folder):
    """A student measured against logits worked out by hand."""
    model, stick = yardstick(folder)
    student = model.hybrid({1: model.mixer(1)})
    figures = stick.measure(Yardstick.final_hidden(student), student)
    with torch.no_grad():
        p = model.whole()(stick.short, use_cache=False).logits.log_softmax(-1)
        q = student(stick.short, use_cache=False).logits.log_softmax(-1)
        long_p, long_q = (m(stick.long, use_cache=False).logits.log_softmax(-1) for m in (model.whole(), student))
    kl = (p.exp() * (p - q)).sum(-1)
    assert figures["kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert figures["kl_95"] == pytest.approx(1.96 * kl.mean(1).std().item() / math.sqrt(3), rel=1e-3)
    assert figures["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    nats = -q[:, :-1].gather(-1, stick.short[:, 1:, None]).mean().item()
    assert figures["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    late = (long_p.exp() * (long_p - long_q)).sum(-1)[0, 256:512].mean().item()
    assert figures["kl_by_position"] == {"0-256": pytest.approx(figures["kl_by_position"]["0-256"]),
                                         "256-512": pytest.approx(late, rel=1e-4)}  # fmt: skip
    assert len(figures["continuations"]) == 6 and figures["perplexity_ratio"] != 1


def test_hybrid_shares_the_teachers_tensors(folder):
    """`TeacherModel.hybrid` is the saved hybrid without a copy of anything."""
    model = teacher_model(folder / "teacher")
    mixers = {0: model.mixer(0), 2: model.mixer(2)}
    student = model.hybrid(mixers)
    assert student.model.layers[0].mixer.out_proj.weight is mixers[0].out_proj.weight
    assert student.model.layers[1].mlp.up_proj.weight is model.whole().model.layers[1].mlp.up_proj.weight
    from convert.alignment.teacher_model import replaced

    ids = random_ids(2, 40)
    with torch.no_grad():
        found = student(ids, use_cache=False).logits
        with replaced(model.whole(), mixers) as other:
            torch.testing.assert_close(found, other(ids, use_cache=False).logits)


def test_small_figures():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2 and common_prefix([1], [1, 2]) == 1
    assert repetition([1, 2, 3, 4, 5, 6]) == 0 and repetition([1] * 10) == pytest.approx(6 / 7)












def test_text_rows_skip(folder):
    words = tokenizer()
    whole = text_rows(folder / "text.jsonl", words, 16, 5)
    assert torch.equal(text_rows(folder / "text.jsonl", words, 16, 3, skip=2), whole[2:])


