"""Map every tensor of a teacher's checkpoint to a tensor of the hybrid, or drop it for a reason.

Headers are enough for this; weights are read only to compare a stored head with the embedding that the configuration
ties it to. The teacher's names are translated to those of a hybrid that keeps every layer's attention ("canonical"
names): a pure renaming, apart from fused matrices, which are row slices. In a replaced layer the canonical attention
tensors then become the mixer's.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from modeling_llamba.hybrid.rounding import Rounding
from modeling_llamba.model.config_values import RECURRENT

from ..hybrids.mapping import LayerMapping, fold_out_bias
from ..hybrids.shapes import HYBRIDS, mixer_shapes, tensor_shapes
from ..io.reader import Checkpoint, TensorInfo, quantisation_fault
from ..io.rules import Part, Rule, Source
from .base import TeacherFamily
from .planes import with_scaled_planes
from .teacher import Teacher, config_errors, hybrid_fields


@dataclasses.dataclass(frozen=True)
class TeacherWeights:
    """A teacher and its checkpoint, with the source of every tensor of the hybrid that keeps every layer's attention.

    It holds no weights: `checkpoint` reads them when the hybrid is written or fitted.
    """

    teacher: Teacher
    checkpoint: Checkpoint
    fields: dict[str, Any]
    """Fields that every hybrid's configuration takes over from the teacher's."""
    config: PreTrainedConfig
    """Configuration of the hybrid with every layer kept as attention."""
    sources: dict[str, Source]
    """Source in the teacher of each tensor of that hybrid."""
    dropped: dict[str, str]
    """Tensors of the teacher that the hybrid does without, and why."""
    notes: tuple[str, ...] = ()
    """Notes on what the hybrid leaves out of the files beside the weights."""

    @classmethod
    def of(cls, teacher: Teacher) -> "TeacherWeights":
        """Read the headers of a teacher's weights and map every tensor to the hybrid."""
        checkpoint = teacher.open_weights()
        layers = teacher.config.num_hidden_layers
        if layers > len(checkpoint.tensors):  # before anything is built
            raise ValueError(
                f"{teacher.name} says {layers} layers, and its weights have {len(checkpoint.tensors)} tensors."
            )
        embedding = "model.embed_tokens.weight"
        head = "lm_head.weight"
        with config_errors(f"The configuration of {teacher.name} makes no hybrid"):
            fields, layer_types = hybrid_fields(teacher.config, teacher.family)
        stored = {teacher.family.text_name(name): name for name in checkpoint.tensors}
        both = {embedding, head} <= stored.keys()
        if fields["tie_word_embeddings"] and both and not teacher.headers_only:
            # transformers, too, unties the head if its stored weights differ from the embedding
            fields["tie_word_embeddings"] = checkpoint.same_values(stored[embedding], stored[head])
        with config_errors(f"The configuration of {teacher.name} makes no hybrid"):
            config = HYBRIDS[teacher.family.hybrid](**copy.deepcopy(fields), layer_types=layer_types)
        copied = teacher.family.copied(teacher.config)
        sources, dropped = canonical_sources(teacher.family, config, checkpoint.tensors, tensor_shapes(config), copied)
        return cls(teacher, checkpoint, fields, config, sources, dropped)

    @functools.cached_property
    def scaled_sources(self) -> dict[str, Source]:
        """The sources, with queries and keys scaled for rounding (planes.py): they make the same model."""
        return with_scaled_planes(self.sources, self.config)

    def sources_for(self, config: PreTrainedConfig) -> dict[str, Source]:
        """The sources of a hybrid's tensors: scaled if it rounds its cache, else the teacher's own."""
        bits = [config.full_attention_bits, config.window_bits]
        rounds = any(Rounding.of_pair(of, config.head_dim)[0].rounds for of in bits)
        return self.scaled_sources if rounds else self.sources

    def bounded(self, context: int) -> tuple[int, ...]:
        """Return the layers whose cache does not grow up to this context in the teacher, because they have a state, a
        window that hides tokens, or a window with heads of its own. A hybrid keeps them as they are."""
        width = self.config.sliding_window
        kept = {RECURRENT}
        if width is not None and (width < context or self.config.sliding_heads is not None):
            kept.add("sliding_attention")
        return tuple(i for i, kind in enumerate(self.config.layer_types) if kind in kept)

    @property
    def has_out_bias(self) -> bool:
        """True if the attention's output projection has a bias."""
        return "model.layers.0.self_attn.o_proj.bias" in self.sources

    def mixer_rules(self, config: PreTrainedConfig, layer: int, initial_decay: float, seed: int) -> list[Rule]:
        """Make the rules for the tensors of the mixer that takes the place of a layer's attention.

        Args:
            config: the hybrid's configuration, with `layer` replaced.
            initial_decay: decay per token of every head. seed: for tensors that have no source in the teacher.
        """
        prefix = f"model.layers.{layer}."
        shapes = {f"{prefix}{name}": shape for name, shape in mixer_shapes(config, layer).items()}
        is_mixer = config.layer_types[layer] == "linear_attention"  # which rounds nothing
        sources = self.sources if is_mixer else self.sources_for(config)
        mapping = LayerMapping(config, layer, sources, initial_decay, seed)
        rules = mapping.rules(shapes)
        hybrid = config.layer_types[layer] == "hybrid"
        if not hybrid and f"{prefix}mixer.out_proj.bias" not in shapes and "o_proj.bias" in mapping.attention:
            if self.teacher.family.hybrid != "phimamba":
                raise ValueError(
                    "This teacher has a bias on o_proj; the mixer needs one on out_proj (out_bias: true)."
                )
            target = f"{prefix}mlp.fc2.bias"
            rules.append(fold_out_bias(target, self.sources[target], mapping.attention["o_proj.bias"]))
        return rules


def expert_pieces(
    family: TeacherFamily, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> dict[str, list[str]]:
    """Tensor of the hybrid -> the teacher's tensors that it consists of, where a family stacks experts."""
    return {
        target: [template.format(i=i, e=e) for e in range(shapes[target][0]) for template in templates]
        for stack, templates in family.stacked.items()
        for i in range(num_layers)
        if (target := stack.format(i=i)) in shapes
    }


def joined_pieces(
    family: TeacherFamily, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> dict[str, list[str]]:
    """Tensor of the hybrid -> the teacher's tensors that it consists of, where a family keeps these apart."""
    return {
        target: [template.format(i=i) for template in templates]
        for whole, templates in family.joined.items()
        for i in range(num_layers)
        if (target := whole.format(i=i)) in shapes
    }


def expand_templates(family: TeacherFamily, num_layers: int) -> dict[str, str | tuple[str, ...] | None]:
    """The family's table with every layer index filled in."""
    table = {}
    for template, target in family.tensors.items():
        for i in range(num_layers) if "{i}" in template else [None]:
            fill = {} if i is None else {"i": i}
            if isinstance(target, tuple):
                table[template.format(**fill)] = tuple(name.format(**fill) for name in target)
            else:
                table[template.format(**fill)] = None if target is None else target.format(**fill)
    return table


def adjacent_rows(width: int, planes: int) -> tuple[int, ...]:
    """Rows of a head that turns pairs of neighbours, in their order in the hybrid."""
    return (*range(0, 2 * planes, 2), *range(1, 2 * planes, 2), *range(2 * planes, width))


def distant_rows(width: int, planes: int) -> tuple[int, ...]:
    """Rows of a head that turns pairs half a head apart, in their order in the hybrid."""
    half = width // 2
    return (*range(planes), *range(half, half + planes), *range(planes, half), *range(half + planes, width))


def row_orders(family: TeacherFamily, config: PreTrainedConfig) -> dict[str, Callable[[int, int], tuple[int, ...]]]:
    """Tensor of the teacher -> the function that orders the rows of its heads, where the hybrid has another order."""
    return {
        template.format(i=i): order
        for templates, order in ((family.adjacent_pairs, adjacent_rows), (family.distant_pairs, distant_rows))
        for template in templates
        for i in range(config.num_hidden_layers)
        if config.rope_of(i) == "main"
    }


def canonical_sources(
    family: TeacherFamily,
    config: PreTrainedConfig,
    teacher: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    copied: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Source], dict[str, str]]:
    """Find each tensor of a hybrid that keeps all its attention in the teacher, and what is dropped.

    Args:
        config: of that hybrid. teacher: tensors of its weights.
        shapes: names and shapes of that hybrid's tensors; a name that is absent (a tied head, a bias the configuration
            does without) is not expected from the teacher.
        copied: names that the teacher does not have -> those whose tensors it reads in their place.

    Raises:
        ValueError: tensors that are missing, unexpected, quantised or of a wrong shape.
    """
    search = _Search(family, config, shapes, copied)
    for name, info in teacher.items():
        search.take(name, info)
    search.stack_pieces()
    search.copy()
    search.note_missing()
    if faults := search.faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ValueError(
            f"The checkpoint does not match its {family.model_type} configuration: {'; '.join(faults[:5])}{more}."
        )
    return search.sources, search.dropped


class _Search:
    """Search for the source of every tensor of a hybrid, which takes the teacher's tensors one by one.

    Args: see `canonical_sources`.
    """

    def __init__(
        self,
        family: TeacherFamily,
        config: PreTrainedConfig,
        shapes: Mapping[str, tuple[int, ...]],
        copied: Mapping[str, str],
    ):
        layers = config.num_hidden_layers
        self.family = family
        self.head_dim = config.head_dim
        self.planes = config.rotary_planes
        self.shapes = shapes
        self.copied = copied
        self.table = expand_templates(family, layers)
        self.by_head = {template.format(i=i) for template in family.by_head for i in range(layers)}
        self.orders = row_orders(family, config)
        self.joined = joined_pieces(family, shapes, layers)
        self.pieces = expert_pieces(family, shapes, layers) | self.joined
        self.whole_of = {name: whole for whole, names in self.pieces.items() for name in names}
        self.sources: dict[str, Source] = {}
        self.dropped: dict[str, str] = {}
        self.faults: list[str] = []
        # they are there, so that they are not called missing, too
        self.unusable: set[str] = set()

    def take(self, name: str, info: TensorInfo) -> None:
        """Find the place of one of the teacher's tensors."""
        known = self.family.text_name(name)
        if name.startswith(self.family.other_parts):
            self.dropped[name] = "not part of the text model, which alone is converted"
        elif known in self.whole_of:
            self._take_piece(name, known, info)
        elif (targets := self.table.get(known, ())) is None:
            self.dropped[name] = "not a weight: follows from the configuration"
        else:
            self._take_whole(name, known, info, (targets,) if isinstance(targets, str) else targets)

    def _take_piece(self, name: str, known: str, info: TensorInfo) -> None:
        """Note a tensor that fills some rows of a tensor of the hybrid, such as one expert of all."""
        whole = self.whole_of[known]
        (count, rows, *columns) = self.shapes[whole]
        shape = (rows * count // len(self.pieces[whole]), *columns)
        if whole in self.joined:
            shape = (*info.shape[:1], rows, *columns)
        self._note(known, quantisation_fault(name, info) or _place(name, info, [known], {known: shape}, self.sources))

    def _take_whole(self, name: str, known: str, info: TensorInfo, targets: tuple[str, ...]) -> None:
        """Note a tensor that becomes one of the hybrid's, or several where the teacher fuses them."""
        present = [target for target in targets if target in self.shapes]
        if known == "lm_head.weight" and not present:
            self.dropped[name] = "tied to the embedding"
            return
        if not present or present[0] in self.copied:
            self.faults.append(f"unexpected tensor {name} {tuple(info.shape)}")
            return
        of_head = self.head_dim if known in self.by_head else None
        self._note(
            known, quantisation_fault(name, info) or _place(name, info, present, self.shapes, self.sources, of_head)
        )
        if known in self.orders and present[0] in self.sources:
            # only now: the tensor's shape has shown that a head is as wide as the configuration says
            order = self.orders[known](self.head_dim, self.planes)
            self.sources[present[0]] = self.sources[present[0]].in_order(order)

    def _note(self, known: str, faults: list[str]) -> None:
        """Note the faults of a tensor, if it has any."""
        self.faults += faults
        if faults:
            self.unusable.add(known)

    def stack_pieces(self) -> None:
        """Put one below the other what was found in pieces."""
        for whole, names in self.pieces.items():
            absent = [name for name in names if name not in self.sources]
            if len(absent) == len(names):
                continue
            self.faults += [f"missing tensor {name}" for name in absent if name not in self.unusable]
            found = [self.sources.pop(name) for name in names if name in self.sources]
            parts = tuple(part for source in found for part in source.parts)
            self.sources[whole] = Source(parts, tuple(self.shapes[whole]))
            rows = sum(source.shape[0] for source in found)
            expected = self.shapes[whole][0]
            if whole in self.joined and not absent and rows != expected:
                self.faults.append(f"{names[0]} and those beside it have {rows} rows where {whole} has {expected}")

    def copy(self) -> None:
        """Give the tensors that the teacher does not have the sources of those that it reads in their place."""
        for target, name in self.copied.items():
            if name in self.sources:
                self.sources[target] = self.sources[name].in_order(None)

    def note_missing(self) -> None:
        """Note the tensors of the hybrid that have no source, by their names in the teacher."""
        names = {}
        for name, targets in self.table.items():
            names |= dict.fromkeys([targets] if isinstance(targets, str) else targets or (), name)
        names |= {whole: pieces[0] for whole, pieces in self.joined.items()}
        missing = [names[t] for t in self.shapes if t not in self.sources and t not in self.copied]
        self.faults += [f"missing tensor {name}" for name in missing if name not in self.unusable]


def _place(name, info, targets, shapes, sources, of_head=None) -> list[str]:
    """Split one teacher tensor along its rows among its targets, in `sources`; return what is wrong with it.

    Args:
        of_head: rows by which the targets alternate; None where each has its rows in one piece.
    """
    expected = (sum(shapes[t][0] for t in targets), *shapes[targets[0]][1:])
    if tuple(info.shape) != expected:
        return [f"{name} has shape {tuple(info.shape)} where the configuration says {expected}"]
    if of_head is not None:
        for number, target in enumerate(targets):
            starts = range(number * of_head, expected[0], len(targets) * of_head)
            parts = tuple(Part(name, start, start + of_head) for start in starts)
            sources[target] = Source(parts, tuple(shapes[target]))
        return []
    start = 0
    for target in targets:
        stop = start + shapes[target][0]
        sources[target] = Source((Part(name, start, stop),), tuple(shapes[target]))
        start = stop
    return []
