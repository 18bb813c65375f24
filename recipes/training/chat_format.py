"""Rows of chat data as the tokenizer at hand can read them: in turns, or as text where it has no chat template."""

from typing import Any

from transformers import PreTrainedTokenizerBase

BETWEEN_TURNS = "\n\n"


def content_of(turn: dict[str, Any]) -> str:
    """The text of a message."""
    content = turn.get("content")
    if not isinstance(content, str):
        raise ValueError(
            f"A message of the data has {type(content).__name__} for its content; only text is understood, so leave "
            "such rows out."
        )
    return content


def question_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The messages before the first answer, from `instruction` and `input`, `messages`, or `prompt`; may be empty."""
    if "instruction" in row:
        parts = (row["instruction"], row.get("input"))
        return [{"role": "user", "content": BETWEEN_TURNS.join(p for p in parts if p)}]
    turns = row.get("messages") or row.get("prompt") or []
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    first_answer = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    return [{"role": turn["role"], "content": content_of(turn)} for turn in turns[:first_answer]]


def as_text(turns: list[dict[str, str]] | str) -> str:
    """The turns' texts one after another, for a model that was never taught turns."""
    return turns if isinstance(turns, str) else BETWEEN_TURNS.join(content_of(turn) for turn in turns)


def question_ids(question: list[dict[str, str]] | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a question as the model is asked it: turns with the beginning of an answer, or text as it is."""
    if isinstance(question, str):
        return tokenizer(question).input_ids
    return tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]


def questions(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A data set of prompts alone: messages, or text for a tokenizer without a chat template."""

    def question(row: dict[str, Any]) -> dict[str, Any]:
        turns = question_of(row)
        return {"prompt": as_text(turns) if tokenizer.chat_template is None else turns}

    found = rows.map(question, remove_columns=rows.column_names).filter(lambda row: len(row["prompt"]) > 0)
    if not len(found):
        raise ValueError(f"None of the data's {len(rows)} rows holds a question.")
    return found


def not_too_long(rows: Any, tokenizer: PreTrainedTokenizerBase, limit: int) -> Any:
    """The questions of at most `limit` tokens."""
    if limit < 1:
        raise ValueError("max_completion_length takes all of the model's context; lower it.")

    kept = rows.filter(lambda row: len(question_ids(row["prompt"], tokenizer)) <= limit)
    if not len(kept):
        raise ValueError(
            f"Every prompt of the data is longer than {limit} tokens, what the answer leaves of the context."
        )
    return kept


def pairs(rows: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Preferences as they are, or as text for a tokenizer without a chat template."""
    if tokenizer.chat_template is not None or isinstance(rows[0]["chosen"], str):
        return rows

    def plain(row: dict[str, Any]) -> dict[str, str]:
        prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
        if prompt is None:
            alike = zip(chosen, rejected, strict=False)
            shared = next((i for i, (a, b) in enumerate(alike) if a != b), min(len(chosen), len(rejected)))
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        return {
            "prompt": as_text(prompt) + BETWEEN_TURNS, "chosen": as_text(chosen), "rejected": as_text(rejected)
        }  # fmt: skip

    return rows.map(plain, remove_columns=rows.column_names)
