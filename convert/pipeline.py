"""A conversion, from the teacher's name to a folder that `from_pretrained` loads.

find the teacher -> read its configuration and tensor headers -> plan -> stream the weights -> add tokenizer, code,
configuration and card -> put the folder in place -> push.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch
import transformers
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

import modeling_llamba
import modeling_phimamba

from .alignment.aligner import Alignment, ClosedFormAligner, selection_of
from .alignment.fit import Progress
from .alignment.settings import BUDGET_LENGTH, read_alignment_file
from .checkpoint.card import write_card
from .checkpoint.folder import check_apart, check_output, staged
from .config import LAYER_CHOICES, ConversionConfig, make_config, parse_size
from .formats.native import check_holdable
from .placement.budget import Budget, Choice, budget_of, budget_report, with_layer_budget
from .placement.heads import as_text, is_number
from .placement.search import BudgetSearch
from .plan import Plan, make_plan
from .teachers.teacher import Teacher, find_teacher, gguf_tokenizer
from .weights.writer import hash_files, plan_shards, write_shards

# where things lie on this machine; not for publication
LOCAL_OPTIONS = ("model", "output", "overwrite", "work_dir", "align_config", "calibration_dataset", "attention_heads")
PACKAGES = {"llamba": (modeling_llamba, "Llamba"), "phimamba": (modeling_phimamba, "PhiMamba")}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def convert(model: str, output: str | os.PathLike, **options: Any) -> Plan:
    """Convert a teacher to a hybrid in one call.

    Args:
        model: Hub id, local folder or GGUF file. output: folder to write.
        options: fields of `ConversionConfig`.

    Raises:
        ValueError: bad options, teacher or weights. OSError: the disk.

    Example:
        >>> convert("HuggingFaceTB/SmolLM2-135M-Instruct", "hybrid", attention_ratio=0.25)  # doctest: +SKIP
    """
    return run(make_config(model=model, output=os.fspath(output), **options))


def plan_conversion(options: ConversionConfig) -> Plan:
    """What `run` would do; reads configuration and tensor headers only.

    Layers that `run` would choose by score stand evenly placed here; their number and what follows from it is right.
    Of a budget that chooses more than layers, the plan holds the first of the choices that keep within it.
    """
    teacher = find_teacher(options.model, options.revision, options.gguf_file, with_weights=False)
    checkpoint = teacher.open_weights()
    if options.align != "none":
        read_alignment_file(options.align_config)  # what is wrong in it is said before anything is run
    if (budget := budget_of(options, teacher, checkpoint)) is not None:
        choices = _what_fits(budget)
        plan = make_plan(teacher, budget.applied(choices[0]), checkpoint)
        return dataclasses.replace(plan, budget=budget_report(budget, choices, None, {}))
    plan = make_plan(teacher, with_layer_budget(options, teacher, checkpoint), checkpoint)
    if options.export_ready:
        check_holdable(plan.config, "bamba")
    return dataclasses.replace(plan, notes=undecided(options, plan))


def _what_fits(budget: Budget) -> list[Choice]:
    return budget.what_fits(read_alignment_file(budget.options.align_config, BUDGET_LENGTH).sequence_length)


def undecided(options: ConversionConfig, plan: Plan) -> tuple[str, ...]:
    """What only scores decide, and a dry run shows as a number of layers or heads."""
    summary, notes = plan.summary(), []
    if not summary["mixer_layers"]:
        return ()
    if selection_of(options).startswith("kl") and summary["attention_layers"]:
        notes.append("scores decide which layers keep their attention, when this is run; here they are evenly placed")
    if options.attention_heads is not None and is_number(options.attention_heads):
        notes.append("scores decide which heads see everything, when this is run; here only their number is right")
    return tuple(notes)


def run(
    options: ConversionConfig,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[int], None] = lambda nbytes: None,
    align_progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Carry out a conversion.

    Args:
        on_plan: called once the plan stands: layers are chosen, nothing is written.
        progress: called with the number of bytes of weights just written.
        align_progress: called with what alignment is doing, how much of it is done, and of how much.

    Raises:
        ValueError: bad options, teacher or weights. OSError: the disk.
    """
    output = Path(options.output).expanduser().resolve()
    check_output(output, options.overwrite)
    check_token(options)
    teacher = find_teacher(options.model, options.revision, options.gguf_file, options.trust_remote_code)
    check_apart(output, teacher.folder)
    checkpoint = teacher.open_weights()
    budget = budget_of(options, teacher, checkpoint)
    first = None if budget is None else _what_fits(budget)[0]
    placed = with_layer_budget(options, teacher, checkpoint) if first is None else budget.applied(first)
    plan = make_plan(teacher, placed, checkpoint)
    if options.export_ready:
        check_holdable(plan.config, "bamba")  # which holds all that the other does
    repository = prepare_repository(options)
    aligner, alignment = None, None
    work = Path(options.work_dir or output.with_name(f"{output.name}.work")).expanduser()
    if options.align != "none":  # what an interruption must not lose
        placed = dataclasses.replace(placed, work_dir=str(work))
    if budget is not None and plan.summary()["mixer_layers"]:
        kept = dataclasses.replace(budget, options=dataclasses.replace(budget.options, work_dir=placed.work_dir))
        search = BudgetSearch(kept, checkpoint, align_progress)
        aligner, (placed, report) = search.aligner, search.run(options.measure)
        plan = dataclasses.replace(make_plan(teacher, placed, checkpoint), budget=report)
    elif options.align != "none" and plan.summary()["mixer_layers"]:
        aligner = ClosedFormAligner(teacher, placed, checkpoint, align_progress)
        if aligner.selects:
            placed = with_layers(placed, aligner.choose_layers())
            plan = make_plan(teacher, placed, checkpoint)
        if placed.attention_heads is not None and is_number(placed.attention_heads):
            heads = as_text(aligner.choose_heads(plan.summary()["mixer_layers"]))
            plan = make_plan(teacher, dataclasses.replace(placed, attention_heads=heads or None), checkpoint)
    on_plan(plan)
    if aligner is not None:
        alignment = aligner.fit_layers(plan.config.layer_types)
        plan = alignment.applied_to(plan)
    shards = plan_shards(plan.rules, plan.dtype, parse_size(options.max_shard_size))
    with staged(output) as folder, concurrent.futures.ThreadPoolExecutor(1) as background:
        stop = threading.Event()
        hashes = background.submit(hash_files, checkpoint.files, stop)
        try:
            write_shards(shards, checkpoint, plan.dtype, folder, progress)
        except BaseException:
            stop.set()
            raise
        add_tokenizer(teacher, folder, options.trust_remote_code)
        add_generation_config(teacher, folder)
        record_provenance(plan, options, alignment, hashes.result())
        add_code(plan.config, folder, plan.dtype)
        write_card(plan, options.push_to_hub or output.name, folder)
        if alignment is not None:
            (folder / "alignment.json").write_text(json.dumps(alignment.report, indent=2) + "\n")
        if options.align == "mohawk" and aligner is not None:
            aligner.train(folder, work / "stages", plan.dtype)
    if repository is not None:
        with push_errors(f"{repository} (the checkpoint is complete in {output})"):
            HfApi().upload_folder(
                repo_id=repository,
                folder_path=output,
                commit_message="Add hybrid",
                # an older upload with other shards would win over this one's
                delete_patterns=["*.safetensors", "*.safetensors.index.json", "*.py"],
            )
    if aligner is not None:
        aligner.finished()
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    return plan


def with_layers(options: ConversionConfig, attention_layers: tuple[int, ...]) -> ConversionConfig:
    """The options with the layers that stay attention named instead of described."""
    described = dict.fromkeys((*LAYER_CHOICES, "layer_selection"))
    return dataclasses.replace(options, **described | {"attention_layers": ",".join(map(str, attention_layers))})


def add_tokenizer(teacher: Teacher, folder: Path, trust_remote_code: bool) -> None:
    """Copy the teacher's tokenizer files as they are; a GGUF file's tokenizer is read out of it."""
    if teacher.gguf_file is not None:
        gguf_tokenizer(teacher.folder, teacher.gguf_file).save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:
        if (teacher.folder / name).is_file():
            shutil.copyfile(teacher.folder / name, folder / name)
    templates = teacher.folder / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    if "auto_map" in settings:
        _copy_tokenizer_code(teacher, folder, trust_remote_code)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if has_tokenizer and "tokenizer_class" not in settings:
        # without it, transformers looks the class up by model type, and ours has none
        tokenizer = AutoTokenizer.from_pretrained(teacher.folder, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(folder)


def _copy_tokenizer_code(teacher: Teacher, folder: Path, trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise ValueError(
            f"The tokenizer of {teacher.name} is code of its own; say --trust-remote-code to take it along."
        )
    ours = {path.name for path in Path(PACKAGES[teacher.family.student][0].__file__).parent.glob("*.py")}
    for path in teacher.folder.glob("*.py"):
        if path.name in ours:
            raise ValueError(f"The teacher's {path.name} would collide with a file of the hybrid's own code.")
        shutil.copyfile(path, folder / path.name)


def add_generation_config(teacher: Teacher, folder: Path) -> None:
    """The teacher's generation settings, or its special tokens where it has none."""
    source = teacher.folder / "generation_config.json"
    if teacher.gguf_file is None and source.is_file():
        shutil.copyfile(source, folder / source.name)
    else:
        GenerationConfig.from_model_config(teacher.config).save_pretrained(folder)


def record_provenance(
    plan: Plan, options: ConversionConfig, alignment: Alignment | None, weight_hashes: dict[str, str]
) -> None:
    """Write into the student's configuration where it comes from."""
    plan.config.conversion |= {
        "teacher": plan.teacher.public_name,
        "teacher_revision": plan.teacher.revision,
        "teacher_model_type": plan.teacher.family.model_type,
        "teacher_sha256": weight_hashes,
        "align": options.align if alignment is not None else "none",
        "calibration": {} if alignment is None else {k: alignment.report[k] for k in ("text", "tokens")},
        "options": {k: v for k, v in options.options().items() if k not in LOCAL_OPTIONS},
        "versions": {
            "convert-to-hybrid": importlib.metadata.version("convert-to-hybrid"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def add_code(config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """The remote code, then config.json, whose presence makes the folder a checkpoint."""
    package, prefix = PACKAGES[config.model_type]
    for path in Path(package.__file__).parent.glob("*.py"):
        if path.name != "__init__.py":
            shutil.copyfile(path, folder / path.name)
    name = config.model_type
    config.architectures = [f"{prefix}ForCausalLM"]
    config.dtype = dtype
    config.auto_map = {
        "AutoConfig": f"configuration_{name}.{prefix}Config",
        "AutoModel": f"modeling_{name}.{prefix}Model",
        "AutoModelForCausalLM": f"modeling_{name}.{prefix}ForCausalLM",
    }
    config.to_json_file(folder / "config.json")


def check_token(options: ConversionConfig) -> None:
    """Refuse a push without a token before any work.

    Raises:
        ValueError: naming the way out.
    """
    if options.push_to_hub is not None and get_token() is None:
        raise ValueError("Pushing needs a Hub token: set HF_TOKEN or run `hf auth login`.")


def prepare_repository(options: ConversionConfig) -> str | None:
    """Make sure the Hub will take the result, before the work rather than after it.

    Raises:
        ValueError: the Hub refuses, or the repository is public and was to be private.
    """
    if options.push_to_hub is None:
        return None
    with push_errors(options.push_to_hub):
        api = HfApi()
        repository = api.create_repo(options.push_to_hub, private=options.private or None, exist_ok=True).repo_id
        if options.private and not api.model_info(repository).private:
            raise ValueError(f"{repository} exists and is public; make it private on the Hub or choose another name.")
    return repository


@contextlib.contextmanager
def push_errors(repository: str) -> Iterator[None]:
    """The Hub client's errors as one line."""
    try:
        yield
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The Hub did not take {repository}: {reason}") from error
    except RuntimeError as error:  # how the client reports a large file that did not get through
        if not isinstance(error.__cause__, (HfHubHTTPError, httpx2.HTTPError, OSError)):
            raise
        reason = " ".join(f"{error} {error.__cause__}".split())
        raise ValueError(f"The upload of {repository} broke off; push the folder to go on: {reason}") from error
