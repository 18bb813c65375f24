"""The teacher's answers made by a server: all of them, several at once, and after it was lost the rest."""

import importlib.util
import json
import sys

import pytest

from recipes import seqkd
from recipes.training import server as module
from recipes.training.load import load_named
from tests.doubles.openai_server import OpenAIServer
from tests.helpers.tiny_chat import TOOLS, chat_tokenizer, save_chat_teacher

COUNT = 12
needs_client = pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="openai is not installed")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_chat_teacher(tmp_path_factory.mktemp("seqkd") / "teacher")


@pytest.fixture
def prompts(tmp_path):
    rows = [{"instruction": f"w{10 + i} w{20 + i}" + " w9" * (i % 4), "input": ""} for i in range(COUNT)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """The client gives a lost server up at once."""
    monkeypatch.setattr(module, "RETRIES", 0)


def answered(teacher, prompts, output, server, *more):
    """The report of a run against a stand-in."""
    return seqkd.main([
        "--teacher_model_name_or_path", str(teacher), "--dataset_name", str(prompts), "--output_dir", str(output),
        "--server", server.url, "--max_new_tokens", "8", "--test_share", "0.25", *more,
    ])  # fmt: skip


def rows_of(folder):
    data = load_named(str(folder))
    return [*data["train"], *data["test"]]


@needs_client
def test_every_question_is_answered_several_at_once(teacher, prompts, tmp_path):
    with OpenAIServer(wait=0.2) as server:
        report = answered(teacher, prompts, tmp_path / "out", server, "--concurrency", "3", "--temperature", "0.5")
    assert report["rows"] == {"train": 9, "test": 3}
    assert server.together == 3
    for row in rows_of(tmp_path / "out"):
        assert row["completion"] == [{"role": "assistant", "content": row["prompt"][0]["content"].upper()}]
    assert all(asked["model"] == "teacher" and asked["temperature"] == 0.5 for asked in server.asked)
    assert len({asked["seed"] for asked in server.asked}) == COUNT
    assert "Answers of teacher" in (tmp_path / "out" / "README.md").read_text()


@needs_client
def test_tools_go_to_the_server_and_calls_come_back(tmp_path):
    """Calls that a server takes out of the text are written as such, with an object for their arguments."""
    teacher = save_chat_teacher(tmp_path / "teacher", template=TOOLS)
    tool = {"type": "function", "function": {"name": "w30", "parameters": {"type": "object"}}}
    row = {"prompt": "w9", "tools": [tool], "chat_template_kwargs": {"mood": "w33"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    call = {"id": "a", "type": "function", "function": {"name": "w30", "arguments": '{"w31": "w32"}'}}
    with OpenAIServer(calls=[call | {"index": 0}]) as server:
        answered(teacher, tmp_path / "rows.jsonl", tmp_path / "out", server, "--test_share", "0")
    assert server.asked[0]["tools"] == [tool]
    assert server.asked[0]["chat_template_kwargs"] == {"mood": "w33"}
    (written,) = load_named(str(tmp_path / "out"))["train"]
    call["function"]["arguments"] = {"w31": "w32"}
    assert written["completion"] == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert written["tools"] == [tool]


@needs_client
def test_a_lost_server_is_asked_for_the_rest_alone(teacher, prompts, tmp_path):
    with OpenAIServer() as server:
        answered(teacher, prompts, tmp_path / "whole", server)
    with OpenAIServer(lost_after=5) as server, pytest.raises(ValueError, match="the same command goes on"):
        answered(teacher, prompts, tmp_path / "out", server, "--concurrency", "1")
    kept = len((tmp_path / "out.work" / "answers.jsonl").read_text().splitlines())
    assert kept == 5
    assert not (tmp_path / "out").exists()
    with OpenAIServer() as server:  # elsewhere, and asked faster
        answered(teacher, prompts, tmp_path / "out", server, "--concurrency", "4")
    assert len(server.asked) == COUNT - kept
    for name in ("train.jsonl", "test.jsonl", "README.md"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


@needs_client
def test_answers_that_are_cut_off_are_left_out(teacher, prompts, tmp_path):
    with OpenAIServer() as server:
        report = answered(teacher, prompts, tmp_path / "out", server, "--max_new_tokens", "3")
    assert report["left out"]["cut off"] == sum(2 + i % 4 > 3 for i in range(COUNT))


@needs_client
def test_a_teacher_without_a_chat_template_goes_on_with_texts(tmp_path):
    teacher = save_chat_teacher(tmp_path / "teacher", template=None)
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "w9 w10"}) + "\n")
    with OpenAIServer() as server:
        answered(teacher, tmp_path / "text.jsonl", tmp_path / "out", server, "--test_share", "0")
    (row,) = load_named(str(tmp_path / "out"))["train"]
    assert row["prompt"] == "w9 w10"
    assert row["completion"] == " W9 W10"
    assert chat_tokenizer(None).chat_template is None
    assert server.asked[0]["prompt"] == "w9 w10"


@needs_client
def test_of_several_models_one_has_to_be_named(teacher, prompts, tmp_path):
    with OpenAIServer(models=("one", "two")) as server:
        with pytest.raises(ValueError, match="serves one, two: give one of these to server_model"):
            answered(teacher, prompts, tmp_path / "out", server)
        answered(teacher, prompts, tmp_path / "out", server, "--server_model", "two")
    assert {asked["model"] for asked in server.asked} == {"two"}


@needs_client
def test_answers_under_way_when_another_failed_are_kept(teacher, prompts, tmp_path):
    """Three at once, of which two are answered later than the third is lost."""
    with OpenAIServer(lost_after=2, wait=0.5) as server, pytest.raises(ValueError, match="the same command goes on"):
        answered(teacher, prompts, tmp_path / "out", server, "--concurrency", "3")
    assert len((tmp_path / "out.work" / "answers.jsonl").read_text().splitlines()) == 2


@needs_client
def test_penalties_of_the_teacher_are_switched_off_where_the_server_has_them(teacher, prompts, tmp_path):
    """vLLM reads them from generation_config.json; other servers may refuse the setting."""
    for owner, penalty in (("vllm", 1.0), ("someone", None)):
        with OpenAIServer(owner=owner) as server:
            answered(teacher, prompts, tmp_path / owner, server)
        assert {asked.get("repetition_penalty") for asked in server.asked} == {penalty}


@needs_client
def test_nobody_is_there(teacher, prompts, tmp_path):
    with OpenAIServer() as server:
        pass
    with pytest.raises(ValueError, match="does not answer"):
        answered(teacher, prompts, tmp_path / "out", server)


def test_options_without_effect_and_an_absent_client(teacher, prompts, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no effect without server"):
        seqkd.SeqKDArguments(output_dir="out", server_model="teacher")
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        seqkd.SeqKDArguments(output_dir="out", concurrency=0)
    monkeypatch.setitem(sys.modules, "openai", None)
    with OpenAIServer() as server, pytest.raises(ValueError, match=r"convert-to-hybrid\[server\]"):
        answered(teacher, prompts, tmp_path / "out", server)
