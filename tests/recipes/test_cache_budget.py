"""The study of what a cache buys, on a tiny teacher."""

import json
from argparse import Namespace

import pytest
import torch
import yaml

from convert import convert
from recipes import cache_budget
from recipes.cache_budget import Distances, decoding_step
from tests.modeling.test_training import tokenizer
from tests.students import make_student
from tests.teachers import make_teacher, random_ids

CHAT = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"


def test_needles_lie_at_their_distances_and_are_asked_for():
    text = random_ids(1, 700)
    probe = Distances(text, range(3, 128), (100, 300, 3000))
    assert probe.distances == [100, 300]
    for distance, place in probe.answers.items():
        width = 2 * cache_budget.ANSWERS
        asked = probe.ids[0, place.stop - width : place.stop]
        assert torch.equal(asked, probe.ids[0, place.stop - width - distance : place.stop - distance])
        assert not torch.equal(asked, text[0, place.stop - width : place.stop])
    following = torch.nn.functional.one_hot(probe.ids.roll(-1, 1), 128).float()
    far = probe.answers[300]
    for wrong, expected in (
        (slice(0), 1.0),
        (slice(far.start - 1, far.stop - 1 - far.stop // 2 + far.start // 2), 0.5),
    ):
        hidden = following.clone()
        hidden[:, wrong] = 0
        assert probe.measure(hidden, torch.nn.Identity()) == {"100": 1.0, "300": expected}
    assert not probe.is_text[probe.answers[100]].any() and probe.is_text.sum() == 700 - 4 * 2 * cache_budget.ANSWERS


@pytest.mark.parametrize("pattern", ["attention", "beside", "beside-only", "hybrid"])
def test_a_decoding_step_is_timed_at_its_length(pattern, monkeypatch):
    model, lengths = make_student(pattern=pattern, dtype=torch.float32), []
    plain = model.model.forward

    def noted(*args, **kwargs):
        lengths.append(kwargs["past_key_values"].get_seq_length())
        return plain(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", noted)
    assert decoding_step(model, 1500) > 0
    assert lengths[1] == 1500 and lengths[-1] == 1500 + cache_budget.STEPS - 1


def tiny_teacher(folder):
    """A teacher with a tokenizer, a text, and an alignment file for texts of its size."""
    make_teacher("llama-gqa").save_pretrained(folder / "teacher")
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(folder / "teacher")
    lines = [" ".join(f"w{30 + (i * j) % 69}" for i in range(100)) for j in range(1, 60)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    settings = {
        "sequence_length": 32, "held_out_sequences": 2, "fit": {"refine_steps": 0},
        "budget": {"windows": [4, 12], "prose_tokens": 64, "answers": 4, "points": 1},
    }  # fmt: skip
    (folder / "align.yaml").write_text(yaml.safe_dump(settings))


def test_rows_are_measured_once_and_keep_within_their_share(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.fidelity.PROMPTS", ("w40 w41",))
    tiny_teacher(tmp_path)
    arguments = cache_budget.parse_arguments(
        [str(tmp_path / "out"), "--validation", str(tmp_path / "text.jsonl"), "--model", str(tmp_path / "teacher"),
         "--align-config", str(tmp_path / "align.yaml"), "--context", "512", "--short-rows", "2",
         "--calibration-tokens", "320", "--ratios", "0.6", "--generate", "--decode", "600",
         "--long", "1024", "--needles", "2", "--hybrids", str(tmp_path / "half")]
    )  # fmt: skip
    options = {"mixer": "none", "window": 64, "sinks": 4, "align": "none", "dtype": "float32"}
    convert(str(tmp_path / "teacher"), tmp_path / "half", attention_ratio=0.5, **options)
    measure, recalled = Distances.measure, []
    monkeypatch.setattr(Distances, "measure", lambda *args: recalled.append(measure(*args)) or {"100": len(recalled)})
    cache_budget.main(arguments)
    results = tmp_path / "out" / "results.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()]
    teacher = next(r for r in records if r["row"] == "teacher")
    assert teacher["kl"] == pytest.approx(0, abs=1e-6) and teacher["greedy_agreement"] == 1
    assert len(recalled) == 2 * len(records) and teacher["recall"] == {"100": 1.5}, "the mean of both needles"
    assert {r["row"] for r in records} == {"teacher", "hybrid half", *cache_budget.ROWS}
    half = next(r for r in records if r["row"] == "hybrid half")
    assert half["share"] == half["ratio"] == pytest.approx((2 + 2 * (64 + 3) / 512) / 4)
    assert all(r["share"] <= r["ratio"] and r["decode_ms"]["600"] > 0 for r in records)
    assert all(list(r["kl_by_position"]) == ["0-256", "256-512", "512-1024"] for r in records), "of the longer text"
    assert all(r["kl"] > 1e-4 for r in records if r["row"] != "teacher")
    assert (tmp_path / "out" / "cache_budget.png").stat().st_size > 1000
    before = results.read_text()
    cache_budget.main(arguments)
    assert results.read_text() == before
    convert(
        str(tmp_path / "teacher"), tmp_path / "half", attention_ratio=0.5, overwrite=True, **options | {"sinks": 3}
    )
    cache_budget.main(arguments)
    assert '"hybrid half"' in results.read_text().removeprefix(before), "another checkpoint of that name"
    with pytest.raises(ValueError, match="holds a run with other arguments"):
        cache_budget.main(Namespace(**vars(arguments) | {"long": 700}))
    assert "| window |" in capsys.readouterr().out
