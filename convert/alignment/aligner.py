"""What a conversion asks of alignment: which layers to replace, and the tensors of their mixers."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from ..config import ConversionConfig, parse_size
from ..placement.heads import Heads, count_heads, query_heads
from ..placement.layer_scores import Examination
from ..placement.retrieval import best_kv_heads, retrieval_scores
from ..plan import MIXER_LAYERS, Plan, attention_budget
from ..teachers.teacher import Teacher, gguf_tokenizer
from ..weights.reader import Checkpoint
from .closed_form import FitSettings
from .fit import FitCache, Fits, Progress, fit_mixers, select_layers, start_mixer
from .mohawk.stages import check_stages
from .mohawk.train import load_hybrid, record_stages, replace_weights, train_hybrid, training_rows_needed
from .settings import AlignmentSettings, read_alignment_file
from .teacher_model import TeacherModel
from .text import SAMPLED, documents, sample_rows, token_rows


@dataclass
class Alignment:
    """What alignment found."""

    tensors: dict[str, torch.Tensor]
    """Of the student, by name; what is not here is mapped as without alignment."""
    report: dict[str, Any] = field(default_factory=dict)
    """For the provenance: text, tokens, errors, scores."""

    def applied_to(self, plan: Plan) -> Plan:
        """The plan that writes the aligned tensors."""

        def aligned(rule):
            tensor = self.tensors.get(rule.target)
            return rule if tensor is None else dataclasses.replace(rule, blocks=lambda checkpoint: iter([tensor]))

        assert self.tensors.keys() <= {rule.target for rule in plan.rules}
        return dataclasses.replace(plan, rules=[aligned(rule) for rule in plan.rules])


class ClosedFormAligner:
    """One conversion's alignment: the text, the teacher as a model, and where fits are kept.

    Args:
        settings: instead of those in the alignment file.
        prose_tokens: how much text, beside what is fitted on, to keep as `prose`.

    Raises:
        ValueError: the text is missing or too short, or the options contradict each other.
    """

    def __init__(
        self,
        teacher: Teacher,
        options: ConversionConfig,
        checkpoint: Checkpoint,
        progress: Progress,
        settings: AlignmentSettings | None = None,
        prose_tokens: int = 0,
    ):
        self.teacher, self.options, self.progress = teacher, options, progress
        self.settings = read_alignment_file(options.align_config) if settings is None else settings
        if options.align == "mohawk":
            check_stages(self.settings, options.mixer, options.low_memory, options.window is not None)
        elif self.settings.start != "teacher":
            raise ValueError(
                f"start: {self.settings.start} begins with mixers that only training fits; say --align mohawk."
            )
        if self.settings.start != "teacher" and options.window is not None:
            raise ValueError(f"start: {self.settings.start} knows no window; leave window out, or say start: teacher.")
        self.model = TeacherModel(teacher, options, checkpoint, options.device, options.low_memory)
        self.memory = parse_size(options.activation_memory)
        self.selects = selection_of(options) in ("kl", "kl+recall")
        length, held_out = self.settings.sequence_length, self.settings.held_out_sequences
        self.num_fitting = max(options.calibration_tokens // length - held_out, 0)
        if self.num_fitting < 1:
            raise ValueError(
                f"calibration_tokens {options.calibration_tokens} leaves nothing to fit on: {held_out} sequences of "
                f"{length} tokens judge the fit. Give at least {(held_out + 1) * length}."
            )
        prose = self.settings.selection.prose_sequences if self.selects else 0
        prose = max(prose, -(-prose_tokens // length))
        rows = calibration_rows(teacher, self.model, options, length, self.num_fitting + held_out + prose)
        self.ids, self.prose = rows[: self.num_fitting + held_out], rows[self.num_fitting + held_out :]
        self.report: dict[str, Any] = {
            "text": public_text_name(options.calibration_dataset),
            "tokens": self.ids.numel(),
            "sequence_length": length,
        }
        # layers are scored one by one, so their quick fits know of no other
        steps = self.settings.selection.refine_steps
        self.quick = dataclasses.replace(self.settings.fit, refine_steps=steps, stream="teacher")
        self._solved: Fits = {}  # quick fits, which a longer one goes on from
        self._caches: list[FitCache] = []
        self.folder = None if options.work_dir is None else Path(options.work_dir).expanduser()

    def follow(self, options: ConversionConfig) -> None:
        """Fit mixers by other options from now on, on the same text."""
        self.options, self.selects = options, selection_of(options) in ("kl", "kl+recall")
        self._solved = {}
        self.model.follow(options)

    def choose_layers(self) -> tuple[int, ...]:
        """The layers that stay attention, by what replacing each costs after a quick fit; unscored where none does."""
        settings, started = self.settings.selection, time.perf_counter()
        weight = settings.recall_weight if selection_of(self.options) == "kl+recall" else 0.0
        count = self.model.num_layers - attention_budget(self.options, self.model.num_layers)
        if count == self.model.num_layers:
            return ()
        name = f"chosen-{count}-{weight}.json"
        found = self._scores_cache().load_json(name)
        if not found:
            mixers, examination, cache = self.candidates()
            chosen, scores = select_layers(mixers, examination, count, weight, settings, cache, self.progress)
            found = {
                "replaced": list(chosen),
                "layer_scores": {layer: dataclasses.asdict(score) for layer, score in sorted(scores.items())},
                "probes_counted": examination.counted,
                "selection_seconds": round(time.perf_counter() - started),
            }
            cache.save_json(name, found)
        self.report |= {key: value for key, value in found.items() if key != "replaced"}
        return tuple(i for i in range(self.model.num_layers) if i not in found["replaced"])

    def choose_heads(self, replaced: list[int]) -> Heads:
        """The heads of the replaced layers that keep full attention, by how much they serve recall."""
        config = self.model.config
        count = count_heads(self.options.attention_heads, self.model.num_layers * config.num_key_value_heads)
        shared = config.num_attention_heads // config.num_key_value_heads
        scores = retrieval_scores(self.model, self.options.window, self.options.seed)
        heads = query_heads(best_kv_heads(scores, replaced, count, shared), shared)
        self.report["retrieval_scores"] = [[round(score, 4) for score in of_layer] for of_layer in scores.tolist()]
        self.model.keep_heads(heads)
        self._solved = {}
        return heads

    def candidates(self) -> tuple[dict[int, torch.nn.Module], Examination, FitCache]:
        """What layers are scored with: a quickly fitted mixer for each, the examination, and where scores are kept."""
        settings = self.settings.selection
        fits = self.fit(list(range(self.model.num_layers)), self.quick)
        examination = Examination(self.model, self.prose, self.options.seed, settings.probe_length)
        return {layer: mixer for layer, (mixer, _) in fits.items()}, examination, self._scores_cache()

    def _scores_cache(self) -> FitCache:
        prose = hashlib.sha256(self.prose.numpy().tobytes()).hexdigest()
        return self.cache(self.quick, selection=dataclasses.asdict(self.settings.selection), prose=prose)

    def fit_layers(self, layer_types: list[str]) -> Alignment:
        """Fit the mixers of the replaced layers."""
        started = time.perf_counter()
        replaced = [i for i, kind in enumerate(layer_types) if kind in MIXER_LAYERS]
        if self.settings.start != "teacher":
            return self._rival_start(replaced)
        fits = self.fit(replaced, self.settings.fit)
        self.report |= {
            "held_out_error": {layer: dataclasses.asdict(fit) for layer, (_, fit) in sorted(fits.items())},
            "fit_seconds": round(time.perf_counter() - started),
        }
        return Alignment(_tensors({layer: mixer for layer, (mixer, _) in fits.items()}), self.report)

    def _rival_start(self, layers: list[int]) -> Alignment:
        """The initial mixers of another method, not fitted at all."""
        start, seed = self.settings.start, self.options.seed
        self.report["start"] = start
        mixers = {layer: start_mixer(self.model, layer, start, seed) for layer in layers}
        return Alignment(_tensors(mixers), self.report)

    def train(self, folder: Path, work: Path, dtype: torch.dtype) -> None:
        """Run the stages of the alignment file on the hybrid in `folder`, and put the result in its place."""
        rows = calibration_rows(
            self.teacher,
            self.model,
            self.options,
            self.settings.sequence_length,
            len(self.ids) + training_rows_needed(self.settings),
            at_least=len(self.ids),
        )
        student = load_hybrid(folder)
        student, report = train_hybrid(
            student, self.model, rows, self.settings, work, seed=self.options.seed, progress=self.progress
        )
        replace_weights(student, folder, dtype, self.options.max_shard_size)
        record_stages(folder, report)

    def fit(self, layers: list[int], settings: FitSettings) -> Fits:
        """Fit those layers' mixers."""
        held_out = self.settings.held_out_sequences
        # on the student's stream a fit depends on the layers replaced before it
        placed = {"layers": layers} if settings.stream == "student" else {}
        goes_on = dataclasses.replace(settings, refine_steps=0) == self.quick
        fits = fit_mixers(
            self.model, layers, self.ids, held_out, settings, self.cache(settings, **placed), self.memory,
            self.options.seed, self.progress, self.folder or existing_parent(Path(self.options.output)),
            solved=self._solved if goes_on else None,
        )  # fmt: skip
        if settings == self.quick:
            self._solved |= fits
        return fits

    def finished(self) -> None:
        """The result is safe: the fits kept for a resumption can go."""
        if self.folder is not None:
            for cache in self._caches:
                cache.drop_mixers()

    def cache(self, settings: FitSettings, **more: Any) -> FitCache:
        """Where fits and scores are kept that depend on these settings, the mixers of now, and `more`."""
        mixer = {k: v for k, v in self.model.mixer_plan.config.to_dict().items() if k.startswith(("mixer", "hybrid"))}
        rules = self.model.mixer_plan.rules
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.model.checkpoint.files]
        key = {
            "teacher": [self.teacher.public_name, self.teacher.revision, files],
            "mixer": mixer,
            "parameters": {
                rule.target: rule.shape for rule in rules if rule.target.startswith("model.layers.0.mixer.")
            },
            "text": hashlib.sha256(self.ids.numpy().tobytes()).hexdigest(),
            "held_out": self.settings.held_out_sequences,
            "fit": dataclasses.asdict(settings),
            "initial_decay": self.options.initial_decay,
            "seed": self.options.seed,
            "version": importlib.metadata.version("convert-to-hybrid"),
        } | more
        self._caches.append(FitCache(self.folder, key))
        return self._caches[-1]


def public_text_name(source: str) -> str:
    """What may be published of the text's name: a Hub id, or the last part of a local path."""
    path = Path(source).expanduser()
    return path.name if path.exists() else source


def existing_parent(path: Path) -> Path:
    """The nearest folder above a path that is there: on the disk that the result goes to."""
    path = path.expanduser().absolute().parent
    return path if path.is_dir() else existing_parent(path)


def _tensors(mixers: dict[int, torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.mixer.{name}": tensor.detach().cpu()
        for layer, mixer in mixers.items()
        for name, tensor in mixer.state_dict().items()
    }


def selection_of(options: ConversionConfig) -> str:
    """How layers are chosen: as asked, or by KL and recall where that is possible and nothing else is said."""
    named = options.attention_layers is not None or options.layer_pattern is not None
    if named:
        return "given"
    if options.layer_selection is not None:
        return options.layer_selection
    return "uniform" if options.align == "none" or options.low_memory else "kl+recall"


def calibration_rows(
    teacher: Teacher,
    model: TeacherModel,
    options: ConversionConfig,
    length: int,
    count: int,
    at_least: int | None = None,
) -> torch.Tensor:
    """(count, length) token ids of the calibration text, or as many rows as it has where `at_least` is enough.

    Raises:
        ValueError: no text, too little of it, or no tokenizer to read it with.
    """
    source = options.calibration_dataset
    if source == SAMPLED:
        if options.low_memory:
            raise ValueError("Sampling text from the teacher needs all of it in memory; leave out --low-memory.")
        return sample_rows(model.whole(), length, count, options.seed)
    tokenizer = load_tokenizer(teacher, options.trust_remote_code)
    texts = documents(source, options.calibration_column, options.calibration_split, options.calibration_config)
    with contextlib.closing(texts):
        rows = token_rows(texts, tokenizer, length, count, source, at_least)
    if int(rows.max()) >= teacher.config.vocab_size:
        raise ValueError(
            f"The tokenizer has token {int(rows.max())}, the model's vocabulary only {teacher.config.vocab_size}: "
            "they do not belong together."
        )
    return rows


def load_tokenizer(teacher: Teacher, trust_remote_code: bool):
    """The teacher's tokenizer.

    Raises:
        ValueError: it has none that loads.
    """
    try:
        if teacher.gguf_file is not None:
            return gguf_tokenizer(teacher.folder, teacher.gguf_file)
        return AutoTokenizer.from_pretrained(teacher.folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{teacher.name} has no tokenizer to read calibration text with ({reason}); calibrate without text "
            "(--calibration-dataset sampled) or map only (--align none)."
        ) from error
