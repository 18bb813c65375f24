"""Copy a model's tokenizer and generation settings into a new checkpoint."""

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from modeling_llamba.ship_code import code_files

from ..teachers.teacher import Teacher, gguf_tokenizer
from ..weights.students import STUDENTS

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


def has_tokenizer(folder: Path) -> bool:
    """Whether any tokenizer file lies in a folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def add_tokenizer(teacher: Teacher, folder: Path, trust_remote_code: bool) -> None:
    """Copy the tokenizer files unchanged; the tokenizer of a GGUF file is read out of it."""
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
    if has_tokenizer(folder) and "tokenizer_class" not in settings:
        # without it, transformers looks the class up by model type, and ours has none
        tokenizer = AutoTokenizer.from_pretrained(teacher.folder, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(folder)


def _copy_tokenizer_code(teacher: Teacher, folder: Path, trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise ValueError(
            f"The tokenizer of {teacher.name} is code of its own; say --trust-remote-code to take it along."
        )
    ours = code_files(STUDENTS[teacher.family.student][0])
    for path in teacher.folder.glob("*.py"):
        if path.name in ours:
            raise ValueError(f"The teacher's {path.name} would collide with a file of the hybrid's own code.")
        shutil.copyfile(path, folder / path.name)


def add_generation_config(teacher: Teacher, folder: Path) -> None:
    """Copy the generation settings, or write the special tokens of the configuration where there are none."""
    source = teacher.folder / "generation_config.json"
    if teacher.gguf_file is None and source.is_file():
        shutil.copyfile(source, folder / source.name)
    else:
        GenerationConfig.from_model_config(teacher.config).save_pretrained(folder)
