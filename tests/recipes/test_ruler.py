"""RULER: its rows against lm-eval's own tasks, their lengths, scores of perfect and of empty answers, the command."""

import contextlib
import io
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes import evaluate as evaluation
from recipes.evaluation.generation import continuations
from recipes.evaluation.ruler import (
    ANSWER_TOKENS,
    ESSAYS,
    TASKS,
    Row,
    generators,
    ruler,
    ruler_rows,
    ruler_scores,
    score,
)
from recipes.evaluation.texts import SHIPPED, TextSource
from tests.helpers.tiny_chat import save_chat_teacher, save_hybrid

pytest.importorskip("wonderwords", reason="lm-eval's RULER needs it")
# the first row of a process takes 15 seconds, since lm-eval writes down six million pairs of words
pytestmark = pytest.mark.slow
LENGTH, ROWS = 1024, 3
FILLED = dict.fromkeys(TASKS, 0.7) | dict.fromkeys(ESSAYS, 0.95) | {"niah_multikey_3": 0.4, "ruler_cwe": 0.5}
"""The least share of a length that a row takes: lm-eval adds several sentences or words at a time."""


def text_pieces(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many pieces of the text that ships; 256 are the bytes alone."""
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(TextSource(SHIPPED).documents(), vocab_size, special_tokens=["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", padding_side="left"
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return text_pieces(3000)


@pytest.mark.parametrize("task", TASKS)
def test_rows(tokenizer, task):
    """What is asked for stands in the text, before the question; the answer that names all of it scores 1."""
    rows = ruler_rows(task, tokenizer, 2 * LENGTH, ROWS, seed=1)
    assert rows == ruler_rows(task, tokenizer, 2 * LENGTH, ROWS, seed=1)
    assert len({r.prompt for r in rows}) == ROWS
    assert rows != ruler_rows(task, tokenizer, 2 * LENGTH, ROWS, seed=2)
    begun_tokens = 40  # lm-eval does not count the beginning of an answer
    for row in rows:
        context, _, question = row.prompt.rpartition("\n" if task != "ruler_cwe" else "\nQuestion")
        assert row.answers
        assert all(answer in context for answer in row.answers)
        assert "?" in question or "Find all variables" in question
        tokens = len(tokenizer(row.prompt).input_ids) + (task != "ruler_fwe") * ANSWER_TOKENS[task]
        assert FILLED[task] * 2 * LENGTH < tokens <= 2 * LENGTH + begun_tokens
        assert score(" and ".join(row.answers).upper(), row) == 1
        assert score("", row) == 0
        assert score(row.answers[0], row) == pytest.approx(1 / len(row.answers))


def lm_eval_rows(task: str, tokenizer_folder: Path) -> list[Row]:
    """The first rows of lm-eval's own task, whose essays are the text that ships."""
    from lm_eval.tasks import TaskManager

    needles, folder = generators().needles, Path(generators().vt.__file__).parent
    words = " ".join(TextSource(SHIPPED).documents()).split()
    haystack = needles.get_haystack
    random.seed(0)
    np.random.seed(0)
    with (
        patch.object(needles, "get_haystack", lambda type_haystack: (
            words if type_haystack == "essay" else haystack(type_haystack)
        )),
        patch.object(needles, "cached_sent_tokenize", lambda text: text.split(". ")),
        contextlib.redirect_stdout(io.StringIO()),
    ):  # fmt: skip
        sizes = {"tokenizer": str(tokenizer_folder), "max_seq_lengths": [LENGTH]}
        manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=sizes)
        own = manager.load([task])["tasks"][task]
    return [
        Row(own.fewshot_context(doc, num_fewshot=0, gen_prefix=own.doc_to_prefix(doc)), doc["outputs"])
        for doc in own.test_docs().select(range(ROWS))
    ]


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_those_of_lm_eval(tokenizer, task, tmp_path):
    """Equal where lm-eval needs no network; elsewhere as many needles in the same words, and the same question."""
    tokenizer.save_pretrained(tmp_path)
    theirs, ours = lm_eval_rows(task, tmp_path), ruler_rows(task, tokenizer, LENGTH, ROWS)
    if task not in ESSAYS:
        assert ours == theirs
        return
    for a, b in zip(ours, theirs, strict=True):
        first, last = ({re.sub(r"for .*? mentioned", "for X mentioned", r.prompt.splitlines()[i]) for r in (a, b)}
                       for i in (0, -1))  # fmt: skip
        assert len(first) == len(last) == 1
        assert len(a.answers) == len(b.answers)
        told = [re.findall(r"One of the special magic (\w+) for \S+ is: ", row.prompt) for row in (a, b)]
        assert told[0] == told[1]
        assert told[0]


class Repeating:
    """Stands for a model: its answers are the given texts, whatever it is asked."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, answers: list[str]):
        self.tokenizer, self.answers = tokenizer, iter(answers)
        self.generation_config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)

    def generate(self, input_ids, attention_mask, max_new_tokens, **how):
        assert how["do_sample"] is False
        assert input_ids.shape[1] == attention_mask.sum(1).max()
        said = [self.tokenizer(next(self.answers) + "</s> nothing counts here").input_ids for _ in input_ids]
        longest = max(map(len, said))
        said = [row + [self.tokenizer.pad_token_id] * (longest - len(row)) for row in said]
        return torch.cat([input_ids, torch.tensor(said)], 1)


def test_scores_of_a_model(tokenizer):
    """An answer ends with the end-of-text token; the score is a mean over rows, and each batch meets its own rows."""
    asked = ["niah_multivalue", "ruler_vt"]
    answers = [[" ".join(row.answers) for row in ruler_rows(task, tokenizer, LENGTH, ROWS)] for task in asked]
    perfect = Repeating(tokenizer, sum(answers, []))
    assert ruler(perfect, tokenizer, [LENGTH], ROWS, asked, batch_size=2) == {LENGTH: dict.fromkeys(asked, 1.0)}
    half = Repeating(tokenizer, [answers[0][0], answers[0][1].split()[0], ""])
    assert ruler_scores(half, tokenizer, asked[0], LENGTH, ROWS) == [1, 0.25, 0]
    with pytest.raises(ValueError, match="RULER has no niah_4 here"):
        ruler(perfect, tokenizer, [LENGTH], 1, ["niah_4"])


def test_an_answer_that_says_all_is_cut(tokenizer):
    """No score changes by it."""
    tiny = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **tiny)).eval()
    prompts = ["A letter", "Three words are", "One"]
    whole, cut = (
        continuations(model, tokenizer, prompts, 12, batch_size=2, chat=False, **how)
        for how in ({}, {"enough": lambda prompt, tokens: len(tokens) >= 3 + prompt})
    )
    assert [len(answer) for answer in whole] == [12] * 3
    for number, (answer, shorter) in enumerate(zip(whole, cut, strict=True)):
        assert shorter[: 3 + number] == answer[: 3 + number]
        assert set(shorter[3 + number :]) <= {tokenizer.pad_token_id}


def test_a_length_without_room_is_refused(tokenizer):
    """Where lm-eval would look for a shorter row forever."""
    letters = text_pieces(256 + 2)
    for task in ("ruler_vt", "ruler_cwe"):
        with pytest.raises(ValueError, match=f"{task} does not fit into 1024 tokens"):
            ruler_rows(task, letters, LENGTH, 1)
    for task in TASKS:
        with pytest.raises(ValueError, match="lengths of 1024 tokens or more; got 1023"):
            ruler_rows(task, tokenizer, LENGTH - 1, 1)
        if task not in ("ruler_vt", "ruler_cwe"):
            assert ruler_rows(task, letters, LENGTH, 1)


def test_the_command(tmp_path):
    """Tasks of RULER are rows beside others, kept when finished."""
    save_hybrid(save_chat_teacher(tmp_path / "teacher"), tmp_path / "hybrid")
    command = [str(tmp_path / "hybrid"), "--teacher", str(tmp_path / "teacher"), "--output", str(tmp_path / "e"),
               "--parts", "tasks", "--tasks", "ruler_vt", "niah_single_2", "--ruler-lengths", "1024",
               "--sequences", "2", "--json"]  # fmt: skip

    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            evaluation.main(command)
        return out.getvalue()

    found = run()
    rows = [(row["task"], row["metric"], row["documents"]) for row in json.loads(found)["tasks"]]
    assert rows == [("ruler_vt", "1024", 2), ("niah_single_2", "1024,shipped", 2)]
    assert all(row["model"] == row["teacher"] == 0 for row in json.loads(found)["tasks"]), "words it has no tokens of"
    with patch.object(evaluation, "ruler_scores", None):
        assert run() == found
    assert evaluation.Options("model", parts=["tasks"], tasks=["arc_easy", "ruler"]).tasks == ["arc_easy", *TASKS]
