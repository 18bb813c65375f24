"""The files beside a model's weights that a new checkpoint takes along: read before any work, written after it."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from modeling_llamba.ship_code import code_files

from ..errors import during
from ..hybrids.shapes import HYBRIDS
from ..io.reader import Checkpoint, GgufCheckpoint, read_json, read_turn_ends
from ..teachers.teacher import LICENCE_FILES, TOKENIZER_FILES, Teacher, first_line, load_tokenizer

PROBES = (
    "The 3 quick brown foxes, 1234567 of them, jumped over 0.5 dogs in 2026!",
    "def f(x):\n    return x * 1.5\n\n\n# hello\n\tif x != y: pass\r\n",
    "  leading and trailing  spaces  ",
    "naïve café – “quotes” … 你好，世界 Привет مرحبا 🙂👍🏽",
    "it's I'LL we've DON'T",
    "",
)
"""Texts on which tokenizers part: numbers, code, line breaks, spaces, other scripts, emoji, contractions."""
ANSWER = "convert-to-hybrid"
"""An answer that no chat template holds by itself."""
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
)  # fmt: skip
"""Tokens at which llama.cpp ends an answer, whether or not a GGUF file says so."""
OF_TRAINING = {
    "use_cache": (False, "generating is slow without a cache"),
    "return_dict_in_generate": (True, "`generate` returns tokens unless asked for more"),
}
"""Generation settings that belong to a teacher's training: their values there, and why a hybrid has others."""
LICENCE_FIELDS = ("license", "license_name", "license_link")
Licence = dict[str, str | list[str]]
"""Licence fields in the head of a model's card."""
SideFiles = dict[str, bytes]
"""Contents by name, relative to the folder of a checkpoint."""


def has_tokenizer(folder: Path) -> bool:
    """Return True if a file of a tokenizer lies in a folder."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def read_side_files(
    teacher: Teacher, trust_remote_code: bool, model_type: str, settings_from: Teacher | None = None
) -> tuple[SideFiles, tuple[str, ...]]:
    """Read the tokenizer's files, the generation settings, and the licence.

    Args:
        model_type: of the checkpoint that takes them along.
        settings_from: another model whose generation settings are taken.

    Returns:
        The files, and notes on what is not as it was: the tokenizer's files, the generation settings.

    Raises:
        ValueError: one of them cannot be read, or the tokenizer is code that is not trusted.
    """
    with during(f"reading the files beside the weights in {teacher.folder}"):
        licences = {p.name: p.read_bytes() for kind in LICENCE_FILES for p in teacher.folder.glob(kind) if p.is_file()}
        files, tokenizer, anew = read_tokenizer(teacher, trust_remote_code, model_type)
        settings, left_out = read_generation_config(settings_from or teacher, tokenizer)
        return files | settings | licences, (*anew, *left_out)


def read_tokenizer(
    teacher: Teacher, trust_remote_code: bool, model_type: str
) -> tuple[SideFiles, PreTrainedTokenizerBase | None, tuple[str, ...]]:
    """Read the files from which a checkpoint of another model type loads the tokenizer that its teacher has.

    transformers chooses a tokenizer's class by the model type and may then leave out what tokenizer_config.json
    declares, so that the teacher's own files can make another tokenizer beside another config.json. They are tried
    there, and where they do, the tokenizer is saved anew under the class that it has.

    Returns:
        The files, the tokenizer, which may be none, and a note where it is saved anew.

    Raises:
        ValueError: the tokenizer cannot be read, cannot be carried over, or is code that is not trusted.
    """
    folder = teacher.folder
    files = {}
    if teacher.gguf_file is None:
        paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
        files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}
        if "auto_map" in (read_json(folder / "tokenizer_config.json") or {}):
            files |= _tokenizer_code(teacher, trust_remote_code)
        if not files:
            return files, None, ()
    tokenizer = load_tokenizer(teacher, trust_remote_code)
    try:
        tokenizer(list(PROBES))
    except Exception as error:  # the tokenizers library raises no other kind
        raise ValueError(
            f"The tokenizer of {teacher.name} cannot read a text ({first_line(error)}); mend or replace its files."
        ) from error
    check_chat_template(tokenizer, folder / (teacher.gguf_file or ""))
    if files and _are_alike(_loaded(files, model_type, trust_remote_code), tokenizer):
        return files, tokenizer, ()
    kind = type(tokenizer).__name__
    notes = []
    if files:
        notes.append(
            f"the tokenizer is saved anew as {kind}: the teacher's files give another one beside a {model_type} model"
        )
    files |= _saved(tokenizer)
    found = _loaded(files, model_type, trust_remote_code)
    if _are_alike(found, tokenizer):
        return files, tokenizer, tuple(notes)
    if teacher.gguf_file is not None and _takes_normaliser(tokenizer, found):
        rule = type(found.backend_tokenizer.normalizer).__name__
        note = f"the tokenizer normalises text by {rule}, as a {kind} does; GGUF files do not say so"
        return files, tokenizer, (note,)
    # a class of a family may bring rules of its own, where the files alone say them all
    settings = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    files["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    if _are_alike(_loaded(files, model_type, trust_remote_code), tokenizer):
        return files, tokenizer, tuple(notes)
    raise ValueError(
        f"The tokenizer of {teacher.name} ({kind}) loads as another one beside a model of type "
        f"{model_type}; save it as a tokenizer.json of its own (AutoTokenizer.from_pretrained(...).save_pretrained)."
    )


def _loaded(files: SideFiles, model_type: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint with these files and this model type; None where it has none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_side_files(files, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception:  # the tokenizers library raises no other kind
            return None


def _takes_normaliser(tokenizer: PreTrainedTokenizerBase, found: PreTrainedTokenizerBase | None) -> bool:
    """Give a tokenizer that was read from GGUF the normaliser of its class, which transformers' reader leaves out.

    Args:
        found: the same tokenizer, saved and loaded again, which has the normaliser.

    Returns:
        True if nothing else was missing; otherwise it is as it was.
    """
    rules = [getattr(one, "backend_tokenizer", None) for one in (tokenizer, found)]
    if None in rules or rules[0].normalizer is not None or rules[1].normalizer is None:
        return False
    rules[0].normalizer = rules[1].normalizer
    if _are_alike(found, tokenizer):
        return True
    rules[0].normalizer = None
    return False


def _are_alike(found: PreTrainedTokenizerBase | None, wanted: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer is the one that is wanted."""
    if found is None:
        return False
    if found.get_vocab() != wanted.get_vocab() or found.chat_template != wanted.chat_template:
        return False
    rules = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (found, wanted)]
    alike = None in rules or rules[0].to_str() == rules[1].to_str()
    return alike and found.special_tokens_map == wanted.special_tokens_map and differing_text(found, wanted) is None


def differing_text(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Return the first of PROBES, and of texts with added tokens, for which two tokenizers give other ids.

    Returns:
        None where all ids agree.
    """
    added = [f"a {token} b{token}" for token in list(one.get_added_vocab())[:64]]
    return next((text for text in (*PROBES, *added) if one(text).input_ids != other(text).input_ids), None)


def check_chat_template(tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    """Refuse a chat template that is no template, without running it."""
    templates = tokenizer.chat_template
    try:
        if isinstance(templates, str):
            templates = {"default": templates}
        for template in (templates or {}).values():
            _compile_jinja_template(template)
    # jinja's, and Python's own about what is no text or nested too deeply
    except (TemplateError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise ValueError(
            f"The chat template in {place} is not valid ({first_line(error)[:200]}); mend or remove it."
        ) from error


def _saved(thing: Any) -> SideFiles:
    """The files that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _tokenizer_code(teacher: Teacher, trust_remote_code: bool) -> SideFiles:
    if not trust_remote_code:
        raise ValueError(
            f"The tokenizer of {teacher.name} is code of its own; say --trust-remote-code to take it along."
        )
    ours = code_files(HYBRIDS[teacher.family.hybrid])
    files = {path.name: path.read_bytes() for path in teacher.folder.glob("*.py")}
    if clash := files.keys() & set(ours):
        raise ValueError(f"The teacher's {min(clash)} would collide with a file of the hybrid's own code.")
    return files


def turn_end(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The special token with which the chat template ends an answer; None where there is no such token or template."""
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError, LookupError):  # a template may ask for turns of other kinds
        return None
    _, found, end = text.rpartition(ANSWER)
    ids = tokenizer(end, add_special_tokens=False).input_ids if found else []
    return next((i for i in ids if (token := tokenizer.added_tokens_decoder.get(i)) and token.special), None)


def _gguf_ends(teacher: Teacher, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer by a GGUF file, by its template, or by their names."""
    names = [token for token in END_TOKENS if token in tokenizer.get_added_vocab()]
    ends = {*tokenizer.convert_tokens_to_ids(names), turn_end(tokenizer)}
    return ends.union(read_turn_ends(teacher.folder / teacher.gguf_file)) - {None}


def read_generation_config(
    teacher: Teacher, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[SideFiles, tuple[str, ...]]:
    """The generation settings, or those of the configuration, the special tokens above all, where there are none.

    Left out is what the teacher's training left behind, and what `generate` ignores: once another training changes a
    token among the settings, transformers saves none that hold such a thing.

    Returns:
        The file, and a note on each setting that was left out.
    """
    path = teacher.folder / "generation_config.json"
    own = teacher.gguf_file is None and path.is_file()
    if not own:
        path = teacher.folder / (teacher.gguf_file or "config.json")
    try:
        if own:
            given = read_json(path)
        else:
            given = GenerationConfig.from_model_config(teacher.config).to_diff_dict()
        eos = given.get("eos_token_id")
        ends = {end for end in (eos if isinstance(eos, list) else [eos]) if end is not None}
        more = _gguf_ends(teacher, tokenizer) if teacher.gguf_file is not None and tokenizer is not None else set()
        if more - ends:
            ends |= more
            given["eos_token_id"] = sorted(ends)
        notes = {name: why for name, (value, why) in OF_TRAINING.items() if given.get(name) is value}
        kept = {name: value for name, value in given.items() if name not in notes}
        notes |= dict.fromkeys(_ignored_settings(kept), "`generate` ignores it beside the other settings")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds generation settings that transformers refuses ({first_line(error)[:200]}); mend that file."
        ) from error
    # any truthy value is True to `generate`, but not to what reports settings as unused
    for name in ("do_sample", "output_attentions"):
        if not isinstance(given.get(name), bool | None):
            raise ValueError(f"{name} in {path} must be true or false, not {str(given[name])[:40]}.")
    said = [f"{name} {json.dumps(given[name])} of {path.name} is left out: {why}" for name, why in notes.items()]
    if (end := turn_end(tokenizer)) is not None and end not in ends:
        said.append(
            f"the chat template ends answers with {tokenizer.decode(end)}, which {path.name} does not name as an end, "
            f"so that generating goes on; add {end} to eos_token_id of OUT/generation_config.json if that is wrong"
        )
    if own and not notes:
        return {path.name: path.read_bytes()}, tuple(said)
    kept = {name: value for name, value in given.items() if name not in notes}
    return {"generation_config.json": (json.dumps(kept, indent=2) + "\n").encode()}, tuple(said)


def _ignored_settings(given: dict[str, Any]) -> list[str]:
    """The names of the settings that transformers does not follow beside the others."""
    try:
        GenerationConfig.from_dict(given).validate(strict=True)
    except ValueError as error:
        names = [name for name in re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE) if name in given]
        if not names:
            raise
        return names + _ignored_settings({name: value for name, value in given.items() if name not in names})
    return []


def write_side_files(files: SideFiles, folder: Path) -> None:
    """Write the tokenizer's files and the generation settings into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_licence(teacher: Teacher, checkpoint: Checkpoint) -> Licence:
    """Read the licence from the head of a teacher's card, or from its GGUF file."""
    if isinstance(checkpoint, GgufCheckpoint):
        if checkpoint.licence is None:
            return {}
        return {"license": checkpoint.licence}
    path = teacher.folder / "README.md"
    if teacher.gguf_file is not None or not path.is_file():
        return {}
    parts = path.read_text(errors="replace").split("---\n", 2)
    try:
        head = None
        if len(parts) == 3 and not parts[0].strip():
            head = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(
            f"The head of {path}, which names the licence, is not valid YAML; mend or remove it."
        ) from error
    if not isinstance(head, dict):
        return {}
    found = {name: head[name] for name in LICENCE_FIELDS if head.get(name)}
    return {name: value for name, value in found.items() if _is_text_or_texts(value)}


def _is_text_or_texts(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(text, str) for text in value)
    return isinstance(value, str)
