"""Calibration and training text as sequences of token ids: the text that ships, a file, a Hub data set, or samples.

A file of token ids saves a long run from reading its text each time, and is smaller: two bytes a token in uint16.

Documents are joined by the end-of-sequence token and cut into rows of equal length. Each row begins as the tokenizer
begins a text, with BOS where it adds one: Gemma without it is another model. Nothing is padded, so every token counts.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from ..options import AlignmentOptions
from ..teachers.teacher import Teacher, first_line, load_tokenizer
from .teacher_model import TeacherModel

DEFAULT_TEXT = Path(__file__).with_name("calibration_text.jsonl")
SAMPLED = "sampled"
TOKEN_IDS = ".npy"
LOADERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
SAMPLE_BATCH = 64


class CalibrationRows(NamedTuple):
    """Token ids (B, L), of which the first `begin` of every row are what the tokenizer begins a text with."""

    ids: torch.Tensor
    begin: int


def documents(source: str, column: str = "text") -> Iterator[str]:
    """The texts of a data set, in order.

    Args:
        source: "default" for the text that ships, a .jsonl, .json, .txt or .parquet file, a folder of them, or a Hub
            data set as NAME:CONFIG:SPLIT, where CONFIG and SPLIT (train) may be left out.
        column: the field that holds the text.
    """
    if source == "default":  # the core installation reads it, without `datasets`
        yield from (json.loads(line)["text"] for line in DEFAULT_TEXT.read_text().splitlines())
        return
    path = Path(source).expanduser()
    if path.suffix in LOADERS and not path.exists():
        raise ValueError(f"{source} cannot be read as text: there is no such file.")
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError
    except ImportError as error:
        raise ValueError(
            "Reading calibration text needs `datasets`: pip install 'convert-to-hybrid[train]'."
        ) from error
    try:
        if path.exists():
            files = [str(file) for file in _files(path)]
            kind = LOADERS[Path(files[0]).suffix]
            # a line of a text file is no document: its breaks belong to the text
            options = {"sample_by": "document"} if kind == "text" else {}
            rows = load_dataset(kind, data_files=files, split="train", streaming=True, **options)
        else:
            name, config, split = (*source.split(":", 2), "", "")[:3]
            rows = load_dataset(name, config or None, split=split or "train", streaming=True)
        for row in rows:
            text = row.get(column, False)
            if text is None:
                continue  # tables have gaps
            if not isinstance(text, str):
                raise TypeError(f"no text in column {column!r}; the columns are {', '.join(sorted(row))}")
            if text.strip():
                yield text
    except (DatasetGenerationError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{source} cannot be read as text: {first_line(error)}") from error


def _files(path: Path) -> list[Path]:
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in LOADERS)
    kinds = {file.suffix for file in files}
    if not files or len(kinds) > 1 or not kinds <= LOADERS.keys():
        raise ValueError(f"{path} must be a {', '.join(LOADERS)} file or a folder with files of one of these kinds.")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{path} is empty; calibration needs text.")
    return files


def beginning_of_text(tokenizer: Any) -> list[int]:
    """Return the token ids that a tokenizer puts before every text, such as BOS."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    return whole[: whole.index(bare[0])] if bare and bare[0] in whole else []


def token_rows(
    texts: Iterator[str], tokenizer: Any, length: int, count: int, source: str, at_least: int | None = None
) -> torch.Tensor:
    """Cut documents, in order and joined by the end-of-sequence token, into (count, length) token ids.

    Args:
        source: what to call the text in a message. at_least: rows that are enough where the text has no more.
    """
    ids: list[int] = []
    begin = beginning_of_text(tokenizer)
    own = length - len(begin)
    separator = [tokenizer.eos_token_id]
    if tokenizer.eos_token_id is None:
        separator = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False).input_ids + separator
        if len(ids) >= count * own:
            break
    return cut_rows(ids, begin, length, count, source, at_least)


def read_ids(source: str) -> numpy.ndarray:
    """Token ids (L,) in a file of `numpy.save`, which stays on disk until they are needed."""
    try:
        ids = numpy.load(Path(source).expanduser(), mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{source} cannot be read as token ids: {first_line(error)}") from error
    if not isinstance(ids, numpy.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or (ids < 0).any():
        raise ValueError(f"{source} must hold one row of whole numbers, the ids of a text's tokens.")
    return ids


def cut_rows(
    ids: Sequence[int], begin: list[int], length: int, count: int, source: str, at_least: int | None = None
) -> torch.Tensor:
    """Cut token ids into (count, length), each row after the ids that begin a text; arguments as of `token_rows`."""
    own = length - len(begin)
    needed = count if at_least is None else at_least
    if len(ids) >= needed * own:
        found = min(len(ids) // own, count)
        rows = torch.tensor(numpy.asarray(ids[: found * own], dtype=numpy.int64)).view(found, own)
        return torch.cat([torch.tensor(begin, dtype=rows.dtype).expand(found, -1), rows], dim=1)
    raise ValueError(
        f"{source} gives {len(ids)} tokens, and {needed} sequences of {length} need {needed * own}; use a longer "
        "text, fewer tokens or shorter sequences."
    )


@torch.no_grad()
def sample_rows(model: torch.nn.Module, length: int, count: int, seed: int) -> torch.Tensor:
    """Draw (count, length) token ids from the model itself at temperature 1, the start token first: no data needed."""
    config = model.config
    start = next((t for t in (config.bos_token_id, config.eos_token_id) if isinstance(t, int)), 0)
    # `generate` takes no generator, so that the process's own is set and given back
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        rows = []
        for first in range(0, count, SAMPLE_BATCH):
            prompt = torch.full((min(SAMPLE_BATCH, count - first), 1), start, device=model.device)
            drawn = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                # an end of text would leave a row shorter than the others
                min_new_tokens=length - 1,
                max_new_tokens=length - 1,
                use_cache=True,
                return_dict_in_generate=False,
            )
            rows.append(drawn.cpu())
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise ValueError("The teacher's logits are not finite, so no text can be drawn from it.") from error
    finally:
        torch.random.set_rng_state(state)
    return torch.cat(rows)


def calibration_rows(
    teacher: Teacher,
    model: TeacherModel,
    alignment: AlignmentOptions,
    count: int,
    at_least: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> CalibrationRows:
    """Read `count` rows of the calibration text, or as many as it has where `at_least` is enough.

    Args:
        alignment: the text and the length of its rows.
        seed: of text that is drawn from the model.
        trust_remote_code: True if the tokenizer may run code from the teacher's repository.
    """
    length = alignment.sequence_length
    assert length is not None
    if alignment.text == SAMPLED:
        return CalibrationRows(sample_rows(model.whole(), length, count, seed), 1)
    try:
        tokenizer = load_tokenizer(teacher, trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"{error} Or calibrate without text (--text sampled), or map the weights only (--align none)."
        ) from error
    whose = "The tokenizer"
    if Path(alignment.text).suffix == TOKEN_IDS:
        whose = alignment.text
        ids = read_ids(alignment.text)
        rows = cut_rows(ids, beginning_of_text(tokenizer), length, count, alignment.text, at_least)
    else:
        with contextlib.closing(documents(alignment.text, alignment.column)) as texts:
            rows = token_rows(texts, tokenizer, length, count, alignment.text, at_least)
    if int(rows.max()) >= teacher.config.vocab_size:
        raise ValueError(
            f"{whose} has token {int(rows.max())}, the model's vocabulary only {teacher.config.vocab_size}: "
            "they do not belong together."
        )
    return CalibrationRows(rows, len(beginning_of_text(tokenizer)))
