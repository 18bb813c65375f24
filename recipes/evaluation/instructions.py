"""Instructions whose following a rule can check, in the manner of IFEval (Zhou et al. 2023, arXiv 2311.07911).

The prompts and rules were written for this project. A rule judges the form of an answer, never its truth.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

TITLE = re.compile(r"<<[^<>]+>>")


class Instruction(NamedTuple):
    """A prompt, and the rule that its answer must keep."""

    prompt: str
    followed: Callable[[str], bool]


def words(text: str) -> list[str]:
    """Runs of letters and digits."""
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text)


def sentences(text: str) -> list[str]:
    """Parts that end in a full stop, an exclamation or a question mark."""
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if words(part)]


def lines(text: str) -> list[str]:
    """Those that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def items(text: str, mark: str) -> int:
    """Lines that begin with a mark, as a regular expression."""
    return sum(bool(re.match(mark, line)) for line in lines(text))


def contains(*wanted: str) -> Callable[[str], bool]:
    """All of these words occur, in any case."""
    return lambda text: set(wanted) <= {word.lower() for word in words(text)}


def lacks(character: str) -> Callable[[str], bool]:
    """Something is said, without this character."""
    return lambda text: bool(words(text)) and character not in text.lower()


def is_json(text: str, *keys: str) -> bool:
    """A JSON object with these keys, and nothing around it but a code fence."""
    try:
        found = json.loads(re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip()))
    except json.JSONDecodeError:
        return False
    return isinstance(found, dict) and set(keys) <= found.keys()


def upper(text: str) -> bool:
    """Letters, all of them capitals."""
    return text.isupper()


def sentence_count(count: int) -> Callable[[str], bool]:
    """Exactly so many sentences."""
    return lambda text: len(sentences(text)) == count


def item_count(count: int, mark: str) -> Callable[[str], bool]:
    """Exactly so many lines that begin with a mark."""
    return lambda text: items(text, mark) == count


def has_json(*keys: str) -> Callable[[str], bool]:
    """A JSON object with these keys, and nothing else."""
    return lambda text: is_json(text, *keys)


def lower(text: str) -> bool:
    """Letters, none of them a capital."""
    return bool(words(text)) and text == text.lower()


def quoted(text: str) -> bool:
    """All of it in double quotation marks."""
    return re.fullmatch(r'".+"', text.strip(), re.DOTALL) is not None


def says_only(*answers: str) -> Callable[[str], bool]:
    """One of these, a full stop after it allowed."""
    return lambda text: text.strip().removesuffix(".").lower() in answers


def at_most(count: int) -> Callable[[str], bool]:
    """One word to `count` words."""
    return lambda text: 1 <= len(words(text)) <= count


def starts(phrase: str) -> Callable[[str], bool]:
    """The answer begins so."""
    return lambda text: text.strip().startswith(phrase)


def ends(phrase: str) -> Callable[[str], bool]:
    """The answer ends so."""
    return lambda text: text.strip().endswith(phrase)


INSTRUCTIONS = (
    Instruction("Answer in capital letters only: what is the capital of Italy?", upper),
    Instruction("Write one short sentence about rain. USE ONLY CAPITAL LETTERS.", upper),
    Instruction("Tell me in lowercase letters only what a bicycle is. Do not use capital letters.", lower),
    Instruction("Answer with a single word: what colour is grass?", at_most(1)),
    Instruction("In at most five words, say what bread is made from.", at_most(5)),
    Instruction("Describe the sea in no more than ten words.", at_most(10)),
    Instruction("Describe a forest in at least 40 words.", lambda text: len(words(text)) >= 40),
    Instruction("Write exactly two sentences about dogs.", sentence_count(2)),
    Instruction("Explain in exactly one sentence what a clock is for.", sentence_count(1)),
    Instruction("Write exactly three sentences about the moon.", sentence_count(3)),
    Instruction("List three fruits as bullet points, each beginning with '- '.", item_count(3, "- ")),
    Instruction("List four colours, one per line, each line beginning with '* '.", item_count(4, r"\* ")),
    Instruction("Give a numbered list of exactly three animals (1., 2., 3.).", item_count(3, r"\d+\.")),
    Instruction("Name five cities, separated by commas, and write nothing else.", lambda text: text.count(",") == 4),
    Instruction("Write a sentence that contains the words 'river' and 'stone'.", contains("river", "stone")),
    Instruction("Write a sentence about winter that uses the word 'quiet'.", contains("quiet")),
    Instruction("Say something about cooking and mention both 'salt' and 'pan'.", contains("salt", "pan")),
    Instruction("Write a short sentence without the letter 'z'.", lacks("z")),
    Instruction("Describe a house without using the letter 'q'.", lacks("q")),
    Instruction("Write one sentence about birds without any comma.", lacks(",")),
    Instruction("Begin your answer with the words 'In short' and explain what a school is.", starts("In short")),
    Instruction("Start your answer with 'Dear friend' and thank someone for a book.", starts("Dear friend")),
    Instruction("Tell me a fact about whales and end your answer with the words 'The end.'", ends("The end.")),
    Instruction("Wish me a good morning and end with an exclamation mark.", ends("!")),
    Instruction("Answer with JSON only: an object with the keys 'name' and 'age'.", has_json("name", "age")),
    Instruction("Answer with a JSON object that has the key 'colour', and nothing else.", has_json("colour")),
    Instruction("Put your whole answer in double quotation marks: greet the reader.", quoted),
    Instruction("Write the numbers from 1 to 5, separated by spaces, and nothing else.", says_only("1 2 3 4 5")),
    Instruction("Is water wet? Answer only 'yes' or 'no'.", says_only("yes", "no")),
    Instruction("Write a title for a story, wrapped in double angle brackets.", lambda text: bool(TITLE.search(text))),
)
