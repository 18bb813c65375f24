"""Published hybrids that are not in transformers' format, and how each is read.

One file per format: how it is recognised, the fields of its configuration, and a table from our tensors to its own.
"""

from typing import Any

from .base import Published, PublishedFormat
from .goombalab import GOOMBALAB
from .llamba import LLAMBA
from .mamba_in_llama import M1, MAMBA_IN_LLAMA_1, MAMBA_IN_LLAMA_2

FORMATS = (GOOMBALAB, LLAMBA, MAMBA_IN_LLAMA_1, MAMBA_IN_LLAMA_2, M1)
SUPPORTED = "; ".join(f"{published.name} ({published.sign})" for published in FORMATS)


def recognise(source: Published) -> PublishedFormat:
    """The format of a checkpoint.

    Raises:
        ValueError: it is none, or more than one; the message says what was found and what is supported.
    """
    check_tensors_not_quantised(source)
    model_type = source.config.get("model_type")
    if "mixer" in source.config and "layer_types" in source.config:
        raise ValueError(f"{source.name} is a checkpoint of this project ({model_type}) already: just load it.")
    found = [published for published in FORMATS if published.recognises(source)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(published.name for published in found)
        raise ValueError(f"{source.name} mixes the tensors of {names}; one checkpoint holds one format.")
    if any(".mamba." in name for name in source.tensors):
        raise ValueError(
            f"{source.name} has Mamba layers under model.layers.*.mamba, but of no known layout, such as "
            f"{next(name for name in source.tensors if '.mamba.' in name)}. Supported: {SUPPORTED}."
        )
    said = f"model_type {model_type!r}" if source.config else "no config.json"
    example = ", ".join(list(source.tensors)[:2])
    raise ValueError(
        f"{source.name} is no published hybrid this project knows: {said}, tensors such as {example}. "
        f"Supported: {SUPPORTED}. A plain Transformer is converted, not imported: convert-to-hybrid MODEL OUT."
    )


def check_config_not_quantised(name: str, config: dict[str, Any]) -> None:
    """Refuse a configuration of quantised weights, which may not even open.

    Raises:
        ValueError: saying how it shows.
    """
    for key in ("quantization_config", "quantization", "quantization_kwargs"):
        if config.get(key):
            raise ValueError(f"{name} is quantised ({key} in config.json); import the full-precision weights.")


def check_tensors_not_quantised(source: Published) -> None:
    """Refuse tensors that go with quantised ones.

    Raises:
        ValueError: naming one.
    """
    scales = [name for name in source.tensors if name.endswith((".scales", ".qweight", ".SCB", ".absmax"))]
    if scales:
        raise ValueError(f"{source.name} is quantised (it has {scales[0]}); import the full-precision weights.")


__all__ = ["FORMATS", "SUPPORTED", "Published", "PublishedFormat", "check_config_not_quantised", "recognise"]
