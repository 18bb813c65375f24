"""The teacher's answers as data: right, once each, the same after an interruption."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments

from convert.io.folder import mark
from recipes import seqkd
from recipes.training.chat_format import faithful_answers
from recipes.training.forms import read_rows
from recipes.training.load import load_named, load_splits
from tests.helpers.data_forms import TOOL, call, rows_of
from tests.helpers.tiny_chat import (  # fmt: skip
    REASONING,
    STRICT,
    TOOLS,
    chat_tokenizer,
    common_arguments,
    parsing_tokenizer,
    save_chat_teacher,
    save_hybrid,
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_chat_teacher(tmp_path_factory.mktemp("seqkd") / "teacher")


@pytest.fixture
def prompts(tmp_path):
    rows = [{"instruction": f"w{10 + i} w{20 + i}" + " w9" * (i % 4), "input": ""} for i in range(12)]
    rows += [rows[0], {"instruction": " ", "input": ""}, {"instruction": "w8 " * 40, "input": ""}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(teacher, prompts, output, *more):
    return [
        "--teacher_model_name_or_path", str(teacher), "--dataset_name", str(prompts), "--output_dir", str(output),
        "--max_prompt_length", "20", "--max_new_tokens", "8", "--batch_size", "4", "--truncated", "keep", *more,
    ]  # fmt: skip


def test_greedy_answers_are_the_teachers_own(teacher, prompts, tmp_path):
    report = seqkd.main(arguments(teacher, prompts, tmp_path / "out", "--test_share", "0.25"))
    assert report["rows"] == {"train": 9, "test": 3}
    assert {k: report["left out"][k] for k in ("duplicates", "too long", "empty")} == {
        "duplicates": 1, "too long": 1, "empty": 1,
    }  # fmt: skip
    model, tokenizer = (c.from_pretrained(teacher) for c in (AutoModelForCausalLM, AutoTokenizer))
    data = load_named(str(tmp_path / "out"))
    assert set(data) == {"train", "test"}
    for row in [*data["train"], *data["test"]]:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
        drawn = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answer = tokenizer.decode(drawn).partition("</s>")[0].strip()
        assert row["completion"] == [{"role": "assistant", "content": answer}]
    assert "Answers of teacher" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("sampling", ([], ["--temperature", "0.7", "--seed", "3"]))
def test_interrupted_it_goes_on_to_the_same_answers(sampling, teacher, prompts, tmp_path, monkeypatch):
    whole = arguments(teacher, prompts, tmp_path / "whole", *sampling)
    seqkd.main(whole)
    generate, calls = seqkd.Answerer.__call__, []

    def interrupted(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, batch)

    monkeypatch.setattr(seqkd.Answerer, "__call__", interrupted)
    broken = arguments(teacher, prompts, tmp_path / "broken", *sampling)
    with pytest.raises(KeyboardInterrupt):
        seqkd.main(broken)
    assert not (tmp_path / "broken").exists()
    with open(tmp_path / "broken.work" / "answers.jsonl", "a") as file:
        file.write('{"index": 3, "te')  # what a crash in the middle of a line leaves
    with pytest.raises(ValueError, match="answers of another run"):
        seqkd.main([*broken, "--max_new_tokens", "9"])
    calls.clear()
    monkeypatch.setattr(seqkd.Answerer, "__call__", lambda self, batch: calls.append(batch) or generate(self, batch))
    seqkd.main(broken)
    assert len(calls) == 1  # the two batches before were not asked again
    for name in ("train.jsonl", "README.md"):
        assert (tmp_path / "broken" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_what_is_cut_off_is_left_out_and_an_end_is_an_end(teacher, prompts, tmp_path, monkeypatch):
    tokenizer = chat_tokenizer()
    assert seqkd.finished_answer([9, 10, 2, 11], tokenizer, {2}) == {"text": "w9 w10", "finished": True}
    assert seqkd.finished_answer([9, 1, 10, 2], tokenizer, {2})["text"] == "w9 <s> w10"
    assert seqkd.finished_answer([9, 10], tokenizer, {2}) == {"text": "w9 w10", "finished": False}
    generate = seqkd.Answerer.__call__

    def ending_some(self, batch):  # the first answer of each of the three batches ends after three tokens
        first, *others = generate(self, batch)
        return [[*first[:3], 2], *([token for token in ids if token != 2] for ids in others)]

    monkeypatch.setattr(seqkd.Answerer, "__call__", ending_some)
    report = seqkd.main(arguments(teacher, prompts, tmp_path / "out", "--truncated", "drop", "--test_share", "0"))
    assert report["rows"]["train"] == 3
    assert report["left out"]["cut off"] == 9
    assert report["kept though cut off"] == 0
    monkeypatch.setattr(seqkd.Answerer, "__call__", lambda self, batch: [[9] * 8 for _ in batch])
    with pytest.raises(ValueError, match="12 of 12 were cut off"):
        seqkd.main(arguments(teacher, prompts, tmp_path / "none", "--truncated", "drop"))
    kept = seqkd.main(arguments(teacher, prompts, tmp_path / "none"))  # goes on with the answers that are there
    assert sum(kept["rows"].values()) == 12
    assert kept["left out"]["cut off"] == 0
    assert kept["kept though cut off"] == 12
    assert "0 cut off. Kept though cut off: 12." in (tmp_path / "none" / "README.md").read_text()


def test_greedy_has_no_penalties(teacher, prompts, tmp_path):
    """Whatever the teacher's own generation settings hold."""
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=9.0, no_repeat_ngram_size=1)
    model.save_pretrained(tmp_path / "teacher")
    chat_tokenizer().save_pretrained(tmp_path / "teacher")
    for name, source in (("plain", teacher), ("penalised", tmp_path / "teacher")):
        seqkd.main(arguments(source, prompts, tmp_path / name))
    assert (tmp_path / "plain" / "train.jsonl").read_text() == (tmp_path / "penalised" / "train.jsonl").read_text()


def test_messages_and_plain_prompts(teacher, tmp_path):
    question = {"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w10"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(question) + "\n")
    seqkd.main(arguments(teacher, tmp_path / "chat.jsonl", tmp_path / "in-turns"))
    (row,) = load_named(str(tmp_path / "in-turns"))["train"]
    assert row["prompt"] == [{"role": "user", "content": "w9"}]
    assert row["completion"][0]["role"] == "assistant"
    plain = tmp_path / "plain"
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(plain)
    chat_tokenizer(template=None).save_pretrained(plain)
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "w9 w10"}) + "\n")
    seqkd.main(arguments(plain, tmp_path / "text.jsonl", tmp_path / "b"))
    (row,) = load_named(str(tmp_path / "b"))["train"]
    assert row["prompt"] == "w9 w10"
    assert isinstance(row["completion"], str)


def test_the_answers_train_a_student(teacher, prompts, tmp_path):
    from recipes import sft

    seqkd.main(arguments(teacher, prompts, tmp_path / "data", "--test_share", "0.3"))
    hybrid = save_hybrid(teacher, tmp_path / "hybrid")
    report = sft.main(common_arguments(hybrid, teacher, tmp_path / "data", tmp_path / "out", "--ce_weight", "1"))
    assert report["after"]["eval_loss"] < report["before"]["eval_loss"]


def test_reasoning_that_the_template_would_cut_is_trained_on(prompts, tmp_path, monkeypatch):
    from recipes import sft
    from recipes.training.run import Run

    teacher = save_chat_teacher(tmp_path / "teacher", template=REASONING)
    monkeypatch.setattr(seqkd.Answerer, "__call__", lambda self, batch: [[20, 7, 21, 2] for _ in batch])
    seqkd.main(arguments(teacher, prompts, tmp_path / "data", "--test_share", "0.3"))
    seen = []
    monkeypatch.setattr(Run, "train", lambda self, trainer, *others: seen.append(trainer))
    hybrid = save_hybrid(teacher, tmp_path / "hybrid")
    sft.main(common_arguments(hybrid, teacher, tmp_path / "data", tmp_path / "out"))
    for rows in (seen[0].train_dataset, seen[0].eval_dataset):
        for row in rows:
            assert row["input_ids"][-6:] == [6, 5, 20, 7, 21, 2]
            assert row["labels"][-5:] == [-100, 20, 7, 21, 2]


def test_tools_are_asked_with_and_trained_with(tmp_path, monkeypatch, capsys):
    """By SeqKD, SFT of its answers and on-policy distillation, as the teacher's template has them."""
    from recipes import distillation, sft
    from recipes.training.run import Run

    teacher = save_chat_teacher(tmp_path / "teacher", template=TOOLS)
    hybrid = save_hybrid(teacher, tmp_path / "hybrid")
    tool = {"type": "function", "function": {"name": "w30", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": "w20"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "w30", "arguments": {"w31": "w32"}}]}
    rows = [
        {"messages": [*asked, call], "tools": [tool], "weight": 1},
        {"messages": [*asked, call], "tools": None},
        {"messages": [*asked, call], "chat_template_kwargs": {"mood": "w33"}},
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, seen, answer = [], [], "w9 w30 w32"

    def answered(self, batch):
        prompts.extend(batch)
        return [[9, 30, 32, 2] for _ in batch]

    monkeypatch.setattr(seqkd.Answerer, "__call__", answered)
    seqkd.main(arguments(teacher, tmp_path / "train.jsonl", tmp_path / "data", "--test_share", "0"))
    assert "columns that nothing uses: weight\n" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(hybrid)
    options = [{"tools": [tool]}, {}, {"mood": "w33"}]
    asks = [tokenizer.apply_chat_template(asked, add_generation_prompt=True, **more)["input_ids"] for more in options]
    assert sorted(prompts) == sorted(asks)
    assert len({tuple(ids) for ids in asks}) == 3
    written = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    said = [{"role": "assistant", "content": answer}]
    assert written == [
        {"prompt": asked, "completion": said, "tools": [tool]},
        {"prompt": asked, "completion": said},
        {"prompt": asked, "completion": said, "chat_template_kwargs": {"mood": "w33"}},
    ]
    monkeypatch.setattr(Run, "train", lambda self, trainer, *others: seen.append(trainer))
    without = ("--eval_strategy", "no")
    sft.main(common_arguments(hybrid, teacher, tmp_path / "data", tmp_path / "sft", *without))
    trained = [row["input_ids"] for row in seen[0].train_dataset]
    assert trained == [ids + [9, 30, 32, 2] for ids in asks]
    without += ("--max_completion_length", "4")
    distillation.main(common_arguments(hybrid, teacher, tmp_path / "train.jsonl", tmp_path / "on", *without))
    assert [tokenizer(row["prompt"]).input_ids for row in seen[1].train_dataset] == asks


def test_what_only_later_rows_have_is_read_again(tmp_path, monkeypatch):
    """`datasets` reads a file in blocks of 10 MB, and casts the others to the first."""
    teacher = save_chat_teacher(tmp_path / "teacher", template=TOOLS)
    rows = [
        {"prompt": "w9"},
        {"prompt": "w10", "tools": [TOOL]},
        {"prompt": "w11", "chat_template_kwargs": {"mood": "w33"}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = [call("w30", w31="w32")]
    answers = [{"text": "w9 " * 4_000_000}, {"text": "", "tool_calls": calls}, {"text": "w9"}]
    monkeypatch.setattr(seqkd, "answer_all", lambda *_: [answer | {"finished": True} for answer in answers])
    seqkd.main(arguments(teacher, tmp_path / "rows.jsonl", tmp_path / "data", "--test_share", "0"))
    found = read_rows(load_named(str(tmp_path / "data"))["train"], "answers")
    assert found["tools"] == [None, [TOOL], None]
    assert [row or None for row in found["chat_template_kwargs"]] == [None, None, {"mood": "w33"}]
    assert found[1]["completion"][0]["tool_calls"] == calls


def test_a_question_that_the_template_refuses_is_named(tmp_path):
    teacher = save_chat_teacher(tmp_path / "teacher", template=STRICT)
    row = {"messages": [{"role": "system", "content": "w9"}, {"role": "user", "content": "w9"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="Row 0 of the data does not fit the chat template .System role"):
        seqkd.main(arguments(teacher, tmp_path / "chat.jsonl", tmp_path / "out"))


@pytest.mark.parametrize(
    "more, expected",
    [
        (("--teacher_model_name_or_path", "/nowhere"), "does not load"),
        (("--temperature", "-1"), "0 or more"),
        (("--max_prompt_length", "1"), "No prompt is left"),
        (("--test_share", "1"), r"\[0, 1\)"),
        (("--dataset_name", "/nowhere.jsonl"), "cannot be read"),
        (("--dataset_name", "picture.jsonl"), "part of type .image., where only text is read"),
        (("--config", "broken.yaml"), "do not parse"),
    ],
)
def test_bad_input(more, expected, teacher, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    (tmp_path / "picture.jsonl").write_text(json.dumps(picture) + "\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match=expected):
        seqkd.main([*arguments(teacher, prompts, tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists()


def test_rows_are_those_of_the_folder_that_is_named(teacher, prompts, tmp_path, monkeypatch):
    """`datasets` keeps a folder with a card, as this recipe writes it, under the last part of its name alone."""
    for number, (folder, token) in enumerate((("a", 20), ("b", 21), ("b", 22))):
        monkeypatch.setattr(seqkd.Answerer, "__call__", lambda self, batch, token=token: [[token, 2] for _ in batch])
        seqkd.main(
            arguments(teacher, prompts, tmp_path / folder / "data", "--overwrite", "true", "--seed", str(number))
        )
        rows = load_named(str(tmp_path / folder / "data"))["train"]
        assert {row["completion"][0]["content"] for row in rows} == {f"w{token}"}
        mixture = DatasetMixtureConfig(datasets=[{"path": str(tmp_path / folder / "data")}])
        mixed, _ = load_splits(ScriptArguments(), mixture, False, "questions")
        assert {row["completion"][0]["content"] for row in mixed} == {f"w{token}"}


def test_an_existing_folder_is_not_replaced_unasked(teacher, prompts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    with pytest.raises(ValueError, match="--overwrite"):
        seqkd.main(arguments(teacher, prompts, tmp_path / "out"))
    with pytest.raises(ValueError, match="not made by this project"):
        seqkd.main([*arguments(teacher, prompts, tmp_path / "out"), "--overwrite", "true"])
    assert (tmp_path / "out" / "kept").exists()
    mark(tmp_path / "out", {"kept"})  # as if this recipe had made it
    torch.manual_seed(0)
    seqkd.main([*arguments(teacher, prompts, tmp_path / "out"), "--overwrite", "true"])
    assert not (tmp_path / "out" / "kept").exists()


CALL = call("weather", city="Oslo")


@pytest.mark.parametrize(
    "family, said, expected",
    [
        (
            "gptoss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.",
            {"content": "Sunny.", "thinking": "Hm."},
        ),
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
            {"content": "", "tool_calls": [CALL]},
        ),
        ("qwen3", "<think>\nHm.\n</think>\n\nSunny.", {"content": "Sunny.", "reasoning_content": "Hm."}),
        (
            "lfm2_2_5",
            '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
            {"content": "", "tool_calls": [CALL]},
        ),
        ("llama3_1", '{"name": {}', {"content": '{"name": {}'}),
    ],
)
def test_an_answer_has_its_reasoning_and_calls_apart(family, said, expected, monkeypatch):
    """Where the tokenizer can tell them from the text; SFT takes the row. A call that is no JSON stays text."""
    tokenizer = parsing_tokenizer(family)
    monkeypatch.setattr(tokenizer, "decode", lambda ids: said if ids == [9] else "")
    prompt = seqkd.Prompt([{"role": "user", "content": "Oslo?"}], [8], {"tools": [TOOL]})
    answer = seqkd.finished_answer([9, 2], tokenizer, {2}, prompt)
    settings = SimpleNamespace(truncated="drop", seed=0, test_share=0)
    (row,) = seqkd.split_rows([prompt], [answer], settings)["train"]
    assert row["completion"] == [{"role": "assistant"} | expected]
    monkeypatch.undo()
    assert len(faithful_answers(read_rows(rows_of(row), "answers"), tokenizer)) == 1
