"""The parts of an evaluation: text, recall, generation, tasks, speed, each cell of them kept as soon as it is done."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from convert.checkpoint.load import load_config, load_model, load_tokenizer, locate
from convert.cli import console

from .folder import COMMON, EvaluationFolder
from .generation import CHECKED, continuations, judge
from .metrics import SHORTEST, Reader, by_position, over_text, per_token, reader
from .recall import hits, questions, side_by_side
from .tasks import run_task, task_files, task_manager
from .tasks import side_by_side as task_rows
from .texts import SHIPPED, TextSource
from .timing import speed

PARTS = ("text", "recall", "generation", "tasks", "speed")
SHORTEST_RECALL = 64
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        teacher: None to measure the model alone. sequences: of each text at each length. depths: of needle and
            passkey, from 0 to 1. chances: what guessing would score, by task. limit: at most so many sequences,
            prompts and documents of anything.

    Raises:
        ValueError: nothing to measure, or a number out of range.
    """

    model: str
    teacher: str | None
    parts: tuple[str, ...] = PARTS
    texts: tuple[TextSource, ...] = (TextSource(SHIPPED),)
    lengths: tuple[int, ...] = (512,)
    sequences: int = 8
    recall_lengths: tuple[int, ...] = (512,)
    recall_sequences: int = 8
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    max_new_tokens: int = 64
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    chances: dict[str, float] = field(default_factory=dict)
    contexts: tuple[int, ...] = (512,)
    speed_batches: tuple[int, ...] = (1,)
    speed_tokens: int = 32
    speed_repeats: int = 3
    limit: int | None = None
    batch_size: int = 8
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False

    def __post_init__(self):
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"--parts takes some of {', '.join(PARTS)}; got {', '.join(unknown) or 'none'}.")
        if "tasks" in self.parts and not self.tasks:
            raise ValueError("--parts names tasks, and --tasks names none.")
        if self.tasks and "tasks" not in self.parts:
            raise ValueError("--tasks names tasks, and --parts leaves them out.")
        if "text" in self.parts and min(self.lengths) < SHORTEST:
            raise ValueError(f"--lengths must be {SHORTEST} or more.")
        if "recall" in self.parts and min(self.recall_lengths) < SHORTEST_RECALL:
            raise ValueError(f"--recall-lengths must be {SHORTEST_RECALL} or more; without, --lengths count.")
        if not all(0 <= depth <= 1 for depth in self.depths) or len(set(self.depths)) < len(self.depths):
            raise ValueError("--depths must be different numbers from 0 to 1.")
        if min(self.contexts, default=1) < 1 or min(self.speed_batches, default=1) < 1:
            raise ValueError("--contexts and --speed-batches must be 1 or more.")
        if not all(0 <= chance < 1 for chance in self.chances.values()):
            raise ValueError("--chance takes TASK=NUMBER with a number from 0 to below 1.")

    def capped(self, count: int) -> int:
        """At most the limit."""
        return count if self.limit is None else min(count, self.limit)

    def longest(self) -> int:
        """Tokens of the longest sequence of all parts but tasks."""
        of_parts = {"text": self.lengths, "recall": self.recall_lengths, "speed": self.contexts}
        return max((max(lengths) for part, lengths in of_parts.items() if part in self.parts), default=0)

    def by_part(self) -> dict[str, dict[str, Any]]:
        """What each part's results depend on; the batch size is not of it."""
        first, *_ = texts = [[*text, text.fingerprint()] for text in self.texts]
        own = {
            "text": {
                "texts": texts,
                "from": sorted({source[1:] for source in self.texts}, key=str),
                "lengths": self.lengths,
                "sequences": self.sequences,
            },
            "recall": {
                "text": first,
                "recall_lengths": self.recall_lengths,
                "recall_sequences": self.recall_sequences,
                "depths": self.depths,
            },
            "generation": {"max_new_tokens": self.max_new_tokens},
            "tasks": {
                "include_path": [self.include_path, task_files(self.include_path)],
                "num_fewshot": self.num_fewshot,
                "apply_chat_template": self.apply_chat_template,
            },
            "speed": {
                "contexts": self.contexts,
                "speed_batches": self.speed_batches,
                "speed_tokens": self.speed_tokens,
                "speed_repeats": self.speed_repeats,
            },
        }
        common = {
            "model": [self.model, fingerprint(self.model, self.trust_remote_code)],
            "teacher": [self.teacher, self.teacher and fingerprint(self.teacher, self.trust_remote_code)],
            "limit": self.limit,
            "seed": self.seed,
            "dtype": self.dtype,
            "device": self.device,
        }
        return {COMMON: common} | {part: own[part] for part in self.parts}


def warn(message: str) -> None:
    """One line on stderr."""
    console.print(f"[yellow]warning:[/] {escape(message)}")


def fingerprint(model: str, trust_remote_code: bool) -> str | None:
    """Changes when a checkpoint does: names, sizes and times of a local one's files; a Hub repository's commit.

    Raises:
        ValueError: there is no such checkpoint.
    """
    name, where = locate(model)
    path = Path(name)
    if not path.is_dir():
        return getattr(load_config(model, trust_remote_code=trust_remote_code), "_commit_hash", None)
    files = [path / where["gguf_file"]] if where else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    config = path / "config.json"
    return hashlib.sha256(repr(states).encode() + (config.read_bytes() if config.is_file() else b"")).hexdigest()[:16]


class Models:
    """Model, teacher and the one tokenizer, loaded when first asked for: a finished evaluation needs none."""

    def __init__(self, settings: Settings):
        self.settings = settings

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, for both.

        Raises:
            ValueError: the teacher's has another vocabulary.
        """
        settings = self.settings
        found = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
        if settings.teacher is not None:
            other = load_tokenizer(settings.teacher, trust_remote_code=settings.trust_remote_code)
            if other.get_vocab() != found.get_vocab():
                raise ValueError(
                    f"{settings.teacher} has another vocabulary than {settings.model}; give its own --teacher."
                )
        return found

    @cached_property
    def by_name(self) -> dict[str, PreTrainedModel]:
        """`model` and, where there is one, `teacher`.

        Raises:
            ValueError: one does not load, or they predict different tokens.
        """
        settings, _ = self.settings, self.tokenizer
        names = {"model": settings.model} | ({} if settings.teacher is None else {"teacher": settings.teacher})
        options = {"trust_remote_code": settings.trust_remote_code}
        found = {which: load_model(name, settings.dtype, settings.device, **options) for which, name in names.items()}
        sizes = {model.get_output_embeddings().weight.shape[0] for model in found.values()}
        if len(sizes) > 1:
            raise ValueError(f"{settings.model} and {settings.teacher} differ in vocabulary: {sorted(sizes)} tokens.")
        for which, model in found.items():
            longest, known = settings.longest(), getattr(model.config, "max_position_embeddings", None)
            if known is not None and longest > known:
                warn(f"the {which} was made for {known} tokens, and {longest} are asked for.")
        return found

    @cached_property
    def readers(self) -> dict[str, Reader]:
        """Of both."""
        return {which: reader(model) for which, model in self.by_name.items()}


class Evaluation:
    """Runs the parts.

    Args:
        progress: told (what, done, total).
    """

    def __init__(self, settings: Settings, folder: EvaluationFolder, progress: Progress):
        self.settings, self.folder, self.progress = settings, folder, progress
        self.models = Models(settings)
        self.manager: Any = None

    def run(self) -> dict[str, Any]:
        """The results of every part asked for."""
        if "tasks" in self.settings.parts:  # before anything is computed for nothing
            self.manager = task_manager(self.settings.tasks, self.settings.include_path)
        parts = {
            "text": self.text,
            "recall": self.recall,
            "generation": self.generation,
            "tasks": self.tasks,
            "speed": self.speed,
        }
        return {name: part() for name, part in parts.items() if name in self.settings.parts}

    def text(self) -> list[dict[str, Any]]:
        """A row per text and length."""
        rows = []
        for source in self.settings.texts:
            own = f"text {source.label} {source.fingerprint() or ''}"
            for length in self.settings.lengths:
                compute = partial(self._text, source, length)
                rows.append(self.folder.cell(f"{own} {length}", compute))
        return rows

    def _text(self, source: TextSource, length: int) -> dict[str, Any]:
        ids = source.rows(self.models.tokenizer, length, self.settings.capped(self.settings.sequences))
        readers, what = self.models.readers, f"{source.label}, {length} tokens"
        ids = ids.to(self.models.by_name["model"].device)
        found = per_token(
            readers["model"],
            readers.get("teacher"),
            ids,
            self.settings.batch_size,
            lambda done: self.progress(what, done, len(ids)),
        )
        return {"name": source.label, "length": length} | over_text(found) | {"by_position": by_position(found)}

    def recall(self) -> list[dict[str, Any]]:
        """Rows per length, probe and distance."""
        lengths = self.settings.recall_lengths
        cells = [self.folder.cell(f"recall {length}", partial(self._recall, length)) for length in lengths]
        return [row for cell in cells for row in cell]

    def _recall(self, length: int) -> list[dict[str, Any]]:
        s, model = self.settings, self.models.by_name["model"]
        prose = s.texts[0].rows(self.models.tokenizer, length, s.capped(s.recall_sequences))
        asked = questions(prose, self.models.tokenizer, model.config.vocab_size, list(s.depths), s.seed)
        rows: list[dict[str, Any]] = []
        for done, question in enumerate(asked, 1):
            said = {w: hits(own, question.probe, s.batch_size, model.device) for w, own in self.models.readers.items()}
            rows += side_by_side(question, said["model"], said.get("teacher"))
            self.progress(f"recall, {length} tokens", done, len(asked))
        return rows

    def generation(self) -> dict[str, Any]:
        """Figures over all prompts, and the answers."""
        prompts = list(CHECKED[: self.settings.capped(len(CHECKED))])
        said = {w: self.folder.cell(f"generation {w}", partial(self._said, w, prompts)) for w in self._names()}
        return self.folder.cell(
            "generation", lambda: judge(prompts, said["model"], said.get("teacher"), self.models.tokenizer)
        )

    def _said(self, which: str, prompts: list[str]) -> list[list[int]]:
        s = self.settings
        return continuations(
            self.models.by_name[which],
            self.models.tokenizer,
            prompts,
            s.max_new_tokens,
            s.batch_size,
            lambda done: self.progress(f"generation, {which}", done, len(prompts)),
        )

    def tasks(self) -> list[dict[str, Any]]:
        """A row per task and metric."""
        rows = []
        for done, name in enumerate(self.settings.tasks, 1):
            found = {w: self.folder.cell(f"tasks {name} {w}", partial(self._task, name, w)) for w in self._names()}
            rows += task_rows(found["model"], found.get("teacher"), self.settings.chances)
            self.progress("tasks", done, len(self.settings.tasks))
        return rows

    def _task(self, name: str, which: str) -> dict[str, Any]:
        s = self.settings
        return run_task(
            self.manager,
            name,
            self.models.by_name[which],
            self.models.tokenizer,
            s.batch_size,
            s.limit,
            s.num_fewshot,
            s.apply_chat_template,
            s.seed,
        )

    def speed(self) -> list[dict[str, Any]]:
        """Rows per context, batch and model."""
        rows = []
        for context in self.settings.contexts:
            for batch in self.settings.speed_batches:
                rows += self.folder.cell(f"speed {context} {batch}", partial(self._speed, context, batch))
        return rows

    def _speed(self, context: int, batch: int) -> list[dict[str, Any]]:
        s, what = self.settings, f"speed, {batch} x {context} tokens"

        def advance(done: int) -> None:
            self.progress(what, done, s.speed_repeats)

        return speed(self.models.by_name, batch, context, s.speed_tokens, s.speed_repeats, advance)

    def _names(self) -> list[str]:
        return ["model"] if self.settings.teacher is None else ["model", "teacher"]
