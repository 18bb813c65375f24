"""Which heads of the replaced layers keep full attention beside the window and the mixer.

Written as layer:head pairs ("16:3,18:0"), as a JSON file {"16": [3], "18": [0]}, or as how many key/value heads, which
the alignment then chooses (`alignment/retrieval.py`). Bytes are paid per key/value head, so one that is chosen takes
along every query head that reads it.
"""

import json
import operator
import re
from pathlib import Path

Heads = dict[int, tuple[int, ...]]
"""Query heads by layer."""


def is_number(text: str) -> bool:
    """Whether heads are counted instead of named."""
    return re.fullmatch(r"\d+|\d*\.\d+", text.strip()) is not None


def count_heads(text: str, total: int) -> int:
    """Key/value heads that "12" or the share "0.05" of the teacher's `total` stands for.

    Raises:
        ValueError: more than there are.
    """
    count = round(float(text) * total) if "." in text else int(text)
    if count == 0 and float(text) > 0:
        raise ValueError(f"attention_heads {text} of {total} key/value heads is less than one; give a larger share.")
    if count > total:
        raise ValueError(f"attention_heads {text} is more than the teacher's {total} key/value heads.")
    return count


def named_heads(text: str, num_layers: int, num_heads: int) -> Heads:
    """Heads that are named, in a list or a file.

    Raises:
        ValueError: neither, no such file, or a layer or head that the teacher does not have.
    """
    if text.endswith(".json") and not Path(text).expanduser().is_file():
        raise ValueError(f"attention_heads {text}: there is no such file.")
    try:
        # pairs are no file's name, and may be too many for one
        if set(text) - set("0123456789:, ") and (path := Path(text).expanduser()).is_file():
            of_layers = json.loads(path.read_text())
            pairs = [(int(layer), operator.index(head)) for layer, heads in of_layers.items() for head in heads]
        else:
            split = [pair.split(":") for pair in text.split(",") if pair.strip()]
            pairs = [(int(layer), int(head)) for layer, head in split]
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"attention_heads {text!r} is neither layer:head pairs (16:3,18:0), nor a number or share of key/value "
            'heads, nor a JSON file {"16": [3]}.'
        ) from error
    heads: Heads = {}
    for layer, head in sorted(set(pairs)):
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise ValueError(f"attention_heads names {layer}:{head}; layers are 0 to {num_layers - 1}, heads 0 to "
                             f"{num_heads - 1}.")  # fmt: skip
        heads[layer] = (*heads.get(layer, ()), head)
    return heads


def as_text(heads: Heads) -> str:
    """Back to layer:head pairs."""
    return ",".join(f"{layer}:{head}" for layer, of_layer in sorted(heads.items()) for head in of_layer)


def query_heads(kv_heads: list[tuple[int, int]], shared: int) -> Heads:
    """The query heads, `shared` of them per key/value head, that read (layer, key/value head) pairs."""
    heads: Heads = {}
    for layer, kv in sorted(kv_heads):
        heads[layer] = (*heads.get(layer, ()), *range(kv * shared, (kv + 1) * shared))
    return heads
