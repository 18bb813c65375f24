"""RULER (Hsieh et al. 2024, arXiv 2404.06654) without a network: needles, variables to follow, words to count.

lm-eval's own generators write the rows and its own rule scores the answers, also below the 4,096 tokens that it begins
at: a row is the one that lm-eval makes of the same seed and tokenizer, so that scores can be compared with others'.
Not so in the tasks of `ESSAYS`: lm-eval takes their text, and what splits it into sentences, from the Hub. Here it is
the text that ships, split after a mark and a space, and it fills short lengths, while lm-eval adds 500 words at a
time. ruler_qa_squad and ruler_qa_hotpot ask about data sets on the Hub, where `lm_eval` itself runs them.

The question comes after the context, and the answer is begun, with no chat template, as lm-eval does by default. A
length includes the room for the answer; ruler_fwe alone fills it before the answer begins, as lm-eval's does. The
first row of a process takes ten seconds and a gigabyte, since lm-eval writes down six million pairs of words.
"""

import contextlib
import io
import random
import re
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .generation import continuations
from .metrics import Advance
from .texts import SHIPPED, TextSource

NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat"},
    "niah_single_2": {"type_haystack": "essay"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", "num_needle_k": 4},
    "niah_multikey_2": {"type_haystack": "needle"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {"type_haystack": "essay", "num_needle_v": 4},
    "niah_multiquery": {"type_haystack": "essay", "num_needle_q": 4},
}
ESSAYS = tuple(name for name, needle in NEEDLES.items() if needle["type_haystack"] == "essay")
NEEDLE_ANSWER = 128
ANSWER_TOKENS = dict.fromkeys(NEEDLES, NEEDLE_ANSWER) | {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
TASKS = tuple(ANSWER_TOKENS)
SHORTEST = 1024
# lm-eval's generators: tokens of an example, and the fewest sentences of it and sentences or words of a row
EXAMPLE_TOKENS, FEWEST_IN_EXAMPLE, FEWEST = 500, 5, 10
# tokens by which rows of as many words differ
MARGIN = 32


class Row(NamedTuple):
    """A context with its question and the beginning of the answer, and all that the answer has to contain."""

    prompt: str
    answers: list[str]


@cache
def generators() -> SimpleNamespace:
    """Import lm-eval's modules, one of which would download on import what is not used here, and says so."""
    try:
        with patch("nltk.download"), contextlib.redirect_stdout(io.StringIO()):
            from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils
    except ImportError as error:
        raise ValueError(
            "RULER needs lm-eval, nltk, scipy and wonderwords: pip install 'convert-to-hybrid[eval]'."
        ) from error
    return SimpleNamespace(
        common=common_utils, cwe=cwe_utils, fwe=fwe_utils, niah=niah_utils, needles=prepare_niah, vt=vt_utils
    )


def ruler_rows(task: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int = 0) -> list[Row]:
    """Rows of one of `TASKS`.

    Args:
        length: number of tokens of a row and its answer, at least `SHORTEST`. A row may be some shorter.
    """
    lm_eval = generators()
    sizes = {"num_samples": count, "max_seq_length": length}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its progress
        _check_length(lm_eval, task, tokenizer, length)
        random.seed(seed)
        np.random.seed(seed)
        # lm-eval shuffles a list when it is imported and goes on from there, whatever was asked for before
        lm_eval.cwe.RNG.seed(42)
        lm_eval.cwe.RNG.shuffle(list(lm_eval.cwe.WORDS))
        if task == "ruler_vt":
            documents = _variables(lm_eval.vt, tokenizer, sizes)
        elif task == "ruler_cwe":
            documents = lm_eval.cwe.sys_word_pair_random(tokenizer=tokenizer, **sizes)
        elif task == "ruler_fwe":
            documents = lm_eval.fwe.sys_kwext(tokenizer, **sizes)
        else:
            documents = _needles(lm_eval, task, tokenizer, sizes)
    between = "\n\n" if task == "ruler_cwe" else " "
    return [Row(doc["input"] + between + doc["gen_prefix"], doc["outputs"]) for doc in documents]


def _needles(lm_eval: SimpleNamespace, task: str, tokenizer: Any, sizes: dict[str, int]) -> list[dict[str, Any]]:
    how = {"type_needle_k": "words", "type_needle_v": "numbers", "template": lm_eval.niah.TEMPLATE} | NEEDLES[task]
    if task in ESSAYS:
        return _in_essays(lm_eval.needles, tokenizer, how, **sizes)
    return lm_eval.needles.generate_samples(
        lm_eval.needles.get_haystack(how["type_haystack"]), tokenizer, **how, **sizes
    )


def _in_essays(
    needles: Any, tokenizer: Any, how: dict[str, Any], num_samples: int, max_seq_length: int
) -> list[dict[str, Any]]:
    """Hide needles between the sentences of as many words of the text that ships as there is room for."""
    how = {"num_needle_k": how.get("num_needle_q", 1), "num_needle_v": 1, "num_needle_q": 1} | how
    kind, verb = how["type_needle_v"], "are"
    if how["num_needle_q"] * how["num_needle_v"] == 1:
        kind, verb = kind.removesuffix("s"), "is"
    text = " ".join(TextSource(SHIPPED).documents()).split()
    words, room = min(len(text), max_seq_length), max_seq_length - NEEDLE_ANSWER
    documents: list[dict[str, Any]] = []
    with patch.object(needles, "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?]) ", text)):
        while len(documents) < num_samples:
            prompt, answers, asked = needles.generate_input_output(words, text, **how)
            begun = f"The special magic {kind} for {asked} mentioned in the provided text {verb}"
            tokens = _tokens(tokenizer, f"{prompt} {begun}")
            if tokens <= room:
                documents.append({"input": prompt, "outputs": answers, "gen_prefix": begun})
                continue
            words = min(words - 1, words * room // tokens)
            assert words > 0, "SHORTEST has room for needles and question, even if every letter is a token"
    return documents


def _variables(vt: Any, tokenizer: Any, sizes: dict[str, int]) -> list[dict[str, Any]]:
    return vt.sys_vartrack_w_noise_random(tokenizer, icl_example=_example(vt, tokenizer), incremental=FEWEST, **sizes)


def _example(vt: Any, tokenizer: Any) -> dict[str, Any]:
    """The example before the variables to follow."""
    return vt.sys_vartrack_w_noise_random(tokenizer, 1, EXAMPLE_TOKENS, incremental=FEWEST_IN_EXAMPLE)[0]


def _check_length(lm_eval: SimpleNamespace, task: str, tokenizer: Any, length: int) -> None:
    """Refuse a length that the shortest row exceeds: lm-eval would look for a shorter one forever."""

    def check(room: int, *texts: str) -> None:
        if sum(_tokens(tokenizer, text) for text in texts) > room:
            raise ValueError(f"{task} does not fit into {length} tokens of this tokenizer; name a greater length.")

    if length < SHORTEST:
        raise ValueError(f"RULER takes lengths of {SHORTEST} tokens or more; got {length}.")
    room = length - ANSWER_TOKENS[task] - MARGIN
    if task == "ruler_vt":
        check(EXAMPLE_TOKENS - ANSWER_TOKENS[task] - MARGIN, _variable_row(lm_eval.vt, FEWEST_IN_EXAMPLE, True))
        example = _example(lm_eval.vt, tokenizer)
        check(room, _variable_row(lm_eval.vt, FEWEST, False), example["input"], " ".join(example["outputs"]))
    elif task == "ruler_cwe":
        example, shortest, answers = lm_eval.cwe.generate_input_output(FEWEST, length)
        check(room, example, shortest, " ".join(f"{i}. {word}" for i, word in enumerate(answers, 1)))


def _variable_row(vt: Any, sentences: int, is_example: bool) -> str:
    return vt.generate_input_output(sentences, num_chains=1, num_hops=4, is_icl=is_example)[0]


def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text).input_ids)


def score(answer: str, row: Row) -> float:
    """Share of what the answer has to contain that it does, as lm-eval counts it."""
    common = generators().common
    return common.string_match_all(common.postprocess_pred([answer]), [row.answers])


def ruler_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    rows: int,
    batch_size: int = 8,
    seed: int = 0,
    advance: Advance = lambda done: None,
) -> list[float]:
    """The score of every row of a task, answered greedily.

    Args:
        advance: called with the number of rows that are answered.
    """
    asked = ruler_rows(task, tokenizer, length, rows, seed)

    def score_of(row: int, tokens: list[int]) -> float:
        return score(tokenizer.decode(tokens, skip_special_tokens=True), asked[row])

    said = continuations(
        model, tokenizer, [row.prompt for row in asked], ANSWER_TOKENS[task], batch_size, advance, chat=False,
        enough=lambda row, tokens: score_of(row, tokens) == 1,  # which nothing that follows takes back
    )  # fmt: skip
    return [score_of(row, tokens) for row, tokens in enumerate(said)]


def ruler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    rows: int,
    tasks: Sequence[str] | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[int, dict[str, float]]:
    """The mean score by length and task, of all `TASKS` or some.

    Args:
        batch_size: rows read at once, padded on the left; 1 for a cache that counts places from the first token.
    """
    unknown = sorted(set(tasks or ()) - set(TASKS))
    if unknown:
        raise ValueError(f"RULER has no {', '.join(unknown)} here; there are {', '.join(TASKS)}.")
    found: dict[int, dict[str, float]] = {}
    for length in lengths:
        found[length] = {}
        for task in tasks or TASKS:
            scores = ruler_scores(model, tokenizer, task, length, rows, batch_size, seed)
            found[length][task] = sum(scores) / len(scores)
    return found
