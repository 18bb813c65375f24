"""Import a hybrid from the format in which others published it, as an ordinary Llamba or PhiMamba checkpoint.

find it -> recognise the format by its tensors -> our configuration and a table of tensors -> stream -> put in place.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..checkpoint.code import write_code_and_config
from ..checkpoint.tokenizer import has_tokenizer
from ..hybrids.shapes import HYBRIDS, OWN_FIELDS, tensor_shapes
from ..io.reader import open_weights, read_json
from ..io.writer import Progress, output_dtype
from ..options import ImportOptions
from ..teachers import get_family
from ..teachers.teacher import Teacher, config_errors, find_teacher, public_name
from .base import ForeignCheckpoint, Format
from .goombalab import GOOMBALAB
from .llamba import LLAMBA
from .mamba_in_llama import M1, MAMBA_IN_LLAMA_1, MAMBA_IN_LLAMA_2
from .table import make_rules
from .transfer import TransferPlan, find_checkpoint, transfer

FORMATS = (GOOMBALAB, LLAMBA, MAMBA_IN_LLAMA_1, MAMBA_IN_LLAMA_2, M1)
SUPPORTED = "; ".join(f"{known.name} ({known.sign})" for known in FORMATS)


def recognise(source: ForeignCheckpoint) -> Format:
    """The format of a checkpoint."""
    scales = [name for name in source.tensors if name.endswith((".scales", ".qweight", ".SCB", ".absmax"))]
    if scales:
        raise ValueError(f"{source.name} is quantised (it has {scales[0]}); import the full-precision weights.")
    model_type = source.config.get("model_type")
    if OWN_FIELDS & source.config.keys() and "layer_types" in source.config:
        raise ValueError(f"{source.name} is a checkpoint of this project ({model_type}) already: just load it.")
    found = [known for known in FORMATS if known.recognises(source)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(known.name for known in found)
        raise ValueError(f"{source.name} mixes the tensors of {names}; one checkpoint holds one format.")
    mamba = next((name for name in source.tensors if ".mamba." in name), None)
    if mamba is not None:
        raise ValueError(
            f"{source.name} has Mamba layers under model.layers.*.mamba whose tensors this project does not know, "
            f"such as {mamba}. Supported: {SUPPORTED}."
        )
    said = "no config.json"
    if source.config:
        said = f"model_type {model_type!r}"
    raise ValueError(
        f"{source.name} is no published hybrid this project knows: {said}, tensors such as "
        f"{', '.join(list(source.tensors)[:2])}. Supported: {SUPPORTED}. "
        "A plain Transformer is converted, not imported: convert-to-hybrid MODEL OUT."
    )


def plan_import(options: ImportOptions) -> TransferPlan:
    """Recognise the format and decide everything.

    Raises:
        ValueError: the format is unknown, or the checkpoint incomplete, quantised or contradictory.
    """
    folder, commit = find_checkpoint(options)
    base = None
    base_config = None
    if options.base is not None:
        base = find_teacher(options.base, with_weights=False)
        base_config = base.config
    config = read_json(folder / "config.json") or {}
    mamba_config = read_json(folder / "mamba_config.json")
    for key in ("quantization_config", "quantization", "quantization_kwargs"):
        if config.get(key):  # looked at first, since quantised weights may not even open
            raise ValueError(
                f"{options.model} is quantised ({key} in config.json); import the full-precision weights."
            )
    checkpoint = open_weights(folder)
    source = ForeignCheckpoint(
        options.model, config, checkpoint, mamba_config, base_config, overridden=dict(options.fields)
    )
    known = recognise(source)
    ours = _make_config(known.hybrid(source), known.fields(source), options)
    if base is not None:
        _check_base(base.config, ours, options.base)
    source.notes += [f"{name} is {value!r} by --set" for name, value in options.fields.items()]
    table, dropped = known.table(source, ours)
    keeps = options.output.dtype == "auto"
    rules = make_rules(table, tensor_shapes(ours), checkpoint.tensors, dropped, known.name, keeps)
    if len(types := sorted({str(rule.dtype)[6:] for rule in rules if rule.dtype is not None})) > 1:
        source.notes.append(
            f"the tensors are {' and '.join(types)}, and kept so; transformers computes with what they are loaded as "
            "(dtype=torch.float32 loses nothing)"
        )
    if base is None and not has_tokenizer(folder):
        source.notes.append(f"no tokenizer: the checkpoint has none and no base model was given ({source.base_flag})")
    name = Path(public_name(options.model)).name
    family = get_family("llama")
    if ours.model_type == "phimamba":
        family = get_family("phi")
    description = f"{name}, {known.name}, imported by convert-to-hybrid. The weights are the original's"
    if not keeps:
        description += f", rounded to {options.output.dtype}"
    return TransferPlan(
        source=Teacher(options.model, folder, ours, family, commit),
        from_format=known.name,
        to_format=f"{ours.model_type} with {ours.mixer}",
        config=ours,
        rules=rules,
        dtype=output_dtype(options.output.dtype, checkpoint.tensors),
        checkpoint=checkpoint,
        description=f"{description}.",
        notes=source.notes,
        dropped=dropped,
        base=base,
        provenance={
            "imported_from": public_name(options.model),
            "revision": commit,
            "format": known.name,
            "notes": source.notes,
        },
    )


def _check_base(base: PreTrainedConfig, ours: PreTrainedConfig, name: str) -> None:
    """Refuse a base model that the hybrid cannot have been made from; a vocabulary may have been padded."""
    if base.hidden_size != ours.hidden_size or not 0 <= ours.vocab_size - base.vocab_size < 1024:
        raise ValueError(
            f"--base {name} is {base.hidden_size} wide with {base.vocab_size} tokens, but this checkpoint is "
            f"{ours.hidden_size} wide with {ours.vocab_size}: it was not made from it."
        )


def _make_config(model_type: str, fields: dict[str, Any], options: ImportOptions) -> PreTrainedConfig:
    config_class = HYBRIDS[model_type]
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(options.fields) - known)
    if unknown:
        raise ValueError(
            f"--set {unknown[0]}: the configuration has no such field; it has {', '.join(sorted(known))}."
        )
    fields = fields | options.fields
    # the cache is compared with that of a teacher whose layers were all attention
    types = ["full_attention" if kind == "linear_attention" else kind for kind in fields["layer_types"]]
    with config_errors(f"{options.model} gives no valid configuration"):
        return config_class(**{"conversion": {"teacher_layer_types": types}} | fields)


def import_checkpoint(
    options: ImportOptions,
    on_plan: Callable[[TransferPlan], None] = lambda plan: None,
    progress: Progress = lambda what, done, total: None,
) -> TransferPlan:
    """Import a published hybrid; see `transfer` for the arguments and errors."""
    return transfer(options, plan_import, write_code_and_config, on_plan, progress)
