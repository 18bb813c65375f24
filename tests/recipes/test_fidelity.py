"""The yardstick, and the ladder that uses it, on a tiny teacher."""

import json
import math

import pytest
import torch

from convert import convert
from recipes import alignment_ladder, head_scores, ladder_plot, layer_scores, window_ladder
from recipes.fidelity import Yardstick, common_prefix, repetition, summary, text_rows
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


def test_window_with_sinks(folder):
    """A window as long as the text is the teacher; a small one differs, and only beyond window and sinks."""
    model, ids = teacher_model(folder / "teacher"), random_ids(2, 40)
    with torch.no_grad():
        exact = Yardstick.final_hidden(model.whole())(ids)
        torch.testing.assert_close(alignment_ladder.windowed(model, [0, 2], 40, 0)(ids), exact)
        small = alignment_ladder.windowed(model, [0, 2], 8, 4)(ids)
    torch.testing.assert_close(small[:, :12], exact[:, :12])  # 8 in the window and 4 sinks see all of 12
    assert (small[:, 13:] - exact[:, 13:]).abs().amax(-1).min() > 1e-4


def test_ladder_climbs_and_resumes(folder, capsys):
    from argparse import Namespace

    chosen = {"placement": "kl", "attention": 0.5, "replaced": [0, 2]}
    (folder / "placements.json").write_text(json.dumps({"placements": [chosen, chosen | {"placement": "uniform"}]}))
    arguments = Namespace(
        placements=folder / "placements.json", placed_by=["kl"],
        output=folder / "ladder", train=folder / "text.jsonl", validation=folder / "text.jsonl",
        model=str(folder / "teacher"), ratios=(0.5, 0.0),
        stage3_rows=alignment_ladder.STAGE3_ROWS, stage3_ratios=(0.5,), calibration_tokens=6 * 512,
        stage2_tokens=4 * 512, stage3_tokens=4 * 512, validation_rows=2, long=512, window=8, beside=8,
        few_tokens=[2 * 512], hybrids=[folder / "exact"],
    )  # fmt: skip
    convert(str(folder / "teacher"), folder / "exact", attention_ratio=0.5, window=512, sinks=0, align="none")
    alignment_ladder.main(arguments)
    records = [json.loads(line) for line in (folder / "ladder" / "results.jsonl").read_text().splitlines()]
    cells = {(record["row"], record["attention"]): record for record in records}
    assert len(cells) == len(records) == 6 * 2 + 1 + 1 + 4 + 2 * 2 + 1 + 1 + 1
    assert cells["hybrid exact", 0.5]["kl"] < 1e-6
    assert cells["closed form, solve only", 0.5]["kl"] < cells["copy", 0.5]["kl"]
    assert all(len(record["layers"]) == (2 if record["attention"] else 4) for record in records)
    assert cells["MOHAWK start + stages 2, 3", 0.5]["kl"] < cells["MOHAWK start + stage 2", 0.5]["kl"]
    beside = cells["closed form beside window 8 + 4 sinks", 0.0]
    assert beside["kl"] < cells["closed form", 0.0]["kl"]
    assert cells["beside a window + stage 3", 0.5]["tokens"] == beside["tokens"] + 4 * 512
    table = capsys.readouterr().out.splitlines()[-19:]
    assert table[0].startswith("| | tokens | 50.0% attention | 0.0% attention |") and len(table) == 2 + 17
    assert f"{cells['copy', 0.0]['kl']:.3f}" in next(line for line in table if line.startswith("| copy"))
    with pytest.raises(ValueError, match="other arguments"):
        alignment_ladder.main(Namespace(**vars(arguments) | {"stage2_tokens": 8 * 512}))
    alignment_ladder.main(arguments)
    assert len((folder / "ladder" / "results.jsonl").read_text().splitlines()) == len(records)


def test_windows_with_and_without_a_mixer_on_the_same_layers(folder, capsys):
    from argparse import Namespace

    arguments = Namespace(
        output=folder / "windows", train=folder / "text.jsonl", validation=folder / "text.jsonl",
        model=str(folder / "teacher"), layers=[0, 2], windows=[8, 512], beside=[8, 0], shared_state=True, length=256,
        calibration_tokens=14 * 256, refine_steps=0, short_rows=2, long=512, long_rows=1,
    )  # fmt: skip
    window_ladder.main(arguments)
    results = (folder / "windows" / "results.jsonl").read_text()
    cells = {(r["row"], len(r["layers"])): r for r in map(json.loads, results.splitlines())}
    alone, beside = "window 8 + 4 sinks", "mixer beside window 8 + 4 sinks, shared state"
    assert set(cells) == {
        (row, n) for row in (alone, "window 512 + 4 sinks", beside, "mixer alone, shared state") for n in (2, 4)
    }
    assert cells["window 512 + 4 sinks", 4]["kl"] == pytest.approx(0, abs=1e-6), "it sees all there is"
    for layers in (2, 4):
        assert cells[beside, layers]["kl"] < cells[alone, layers]["kl"]
        assert cells[beside, layers]["bytes"] > cells[alone, layers]["bytes"]
    window_ladder.main(arguments)
    assert (folder / "windows" / "results.jsonl").read_text() == results


def test_kl_against_tokens_has_a_line_per_method(tmp_path):
    def record(row, tokens, kl, attention=0.5):
        return {"row": row, "attention": attention, "tokens": tokens, "kl": kl, "kl_95": 0.01}

    results = [
        record("window 92 + 4 sinks", 0, 0.06),
        record("closed form", 9000, 0.3),
        record("closed form, solve only, 2048 tokens", 2048, 0.9),
        record("closed form, evenly placed", 9000, 0.6),
        record("closed form", 9000, 1.0, attention=0.25),
        record("closed form beside window 32 + 4 sinks", 9000, 0.1),
        record("MOHAWK start + stage 2", 5000, 1.2),
        record("hybrid mine", 0, 0.2),
    ]
    assert ladder_plot.lines_of(results, 0.5) == {
        "mixers alone, closed form first": [(2048, 0.9, 0.01), (9000, 0.3, 0.01)],
        "beside a window, closed form first": [(9000, 0.1, 0.01)],
        "MOHAWK's start": [(5000, 1.2, 0.01)],
    }
    ladder_plot.plot(results, 0.5, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"12\.5% attention; there are \[0\.25, 0\.5\]"):
        ladder_plot.plot(results, 0.125, tmp_path / "ladder.png")


def test_layer_scores_are_plotted(folder):
    report = layer_scores.main(folder / "layers", str(folder / "teacher"), str(folder / "text.jsonl"), 6 * 512)
    assert (folder / "layers" / "scores.png").stat().st_size > 5000
    assert set(report["scores"]) == {0, 1, 2, 3} and len(report["placements"]) == 16
    assert json.loads((folder / "layers" / "scores.json").read_text())["teacher"]["kl"] < 1e-6
    by_kl, uniform = (
        next(r for r in report["placements"] if (r["placement"], r["attention"]) == (method, 0.75))
        for method in ("kl", "uniform")
    )
    assert by_kl["kl"] <= uniform["kl"] + 1e-9
    cheapest = sorted(report["scores"], key=lambda layer: report["scores"][layer]["kl"])
    at_once = {r["attention"]: set(r["replaced"]) for r in report["placements"] if r["placement"] == "kl"}
    assert all(layers == set(cheapest[: len(layers)]) for layers in at_once.values()), "by what each costs alone"


def test_text_rows_skip(folder):
    words = tokenizer()
    whole = text_rows(folder / "text.jsonl", words, 16, 5)
    assert torch.equal(text_rows(folder / "text.jsonl", words, 16, 3, skip=2), whole[2:])


def test_head_scores_are_checked_and_plotted(folder):
    report = head_scores.main(folder / "heads", str(folder / "teacher"), 8, 3)
    assert (folder / "heads" / "heads.png").stat().st_size > 5000
    teacher, everything = report["teacher"], report["kept"][-1]
    assert everything["loss"] == pytest.approx(teacher["loss"], rel=1e-4), "all heads kept are the teacher"
    assert [row["bytes"] for row in report["kept"]] == sorted(row["bytes"] for row in report["kept"])
    assert -1 <= report["rank_correlation"] <= 1 and len(report["ablation"]) == 8
