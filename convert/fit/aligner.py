"""Alignment as a conversion uses it: fits of any layers under any placement, on one text."""

import contextlib
import dataclasses
import functools
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..hybrids.shapes import tensor_shapes
from ..io.rules import Rule
from ..io.version import project_version
from ..io.writer import Progress
from ..layout.config import hybrid_config
from ..layout.placement import Placement
from ..memory import keep_free_memory, return_free_memory
from ..options import FitOptions, differences, parse_size
from ..plan import Plan
from ..resolve import Resolved
from ..teachers.teacher import public_name
from ..teachers.weights import TeacherWeights
from .activations import ActivationStream
from .fit import FitCache, Fits, fit_for_first, fit_layers
from .hybrid_fit import cut_map, ranks_within
from .key_offset import SEQUENCES, offset_on
from .probes import plain_tokens, with_recall
from .processes import ALONE, OVER, Team
from .teacher_model import TeacherModel
from .text import CalibrationRows, calibration_rows


@dataclass
class Alignment:
    """Result of an alignment: tensors, the placement with its ranks, and a report."""

    tensors: dict[str, torch.Tensor]
    """Fitted tensors of the hybrid by name; all others are mapped as without alignment."""
    placement: Placement
    """The plan's, with the ranks that were chosen."""
    report: dict[str, Any] = field(default_factory=dict)
    """Text, tokens, errors and scores, for the record."""

    def rules(self, plan: Plan) -> list[Rule]:
        """Return the plan's rules, with the fitted tensors in the place of those that are mapped."""

        def aligned(rule: Rule) -> Rule:
            tensor = self.tensors.get(rule.target)
            return rule if tensor is None else dataclasses.replace(rule, blocks=lambda checkpoint: iter([tensor]))

        assert self.tensors.keys() <= {rule.target for rule in plan.rules}
        return [aligned(rule) for rule in plan.rules]


KEPT_OFFSET = "self_attn.key_offset"
LARGEST_KEPT = 2**26
"""Bytes of a freed block that is kept. With 2**30 the default takes as long and a quarter more memory, with 2**24 a
tenth longer."""


class Aligner:
    """One conversion's alignment: the text, the teacher as a model, and the folder that keeps fits.

    Args:
        work: folder that keeps fits, so that an interrupted run resumes; None keeps nothing.
        team: processes that fit together.
    """

    def __init__(
        self,
        weights: TeacherWeights,
        resolved: Resolved,
        progress: Progress = lambda what, done, total: None,
        work: Path | None = None,
        team: Team = ALONE,
    ):
        self.weights = weights
        self.resolved = resolved
        self.progress = progress
        self.work = work
        self.team = team
        keep_free_memory(LARGEST_KEPT)
        self.model = TeacherModel(
            weights, resolved.alignment.device, resolved.initial_decay, resolved.seed, resolved.context
        )
        self.report: dict[str, Any] = {}
        self._caches: list[FitCache] = []

    def follow(self, placement: Placement) -> None:
        """Make mixers for this placement from now on, on the same text."""
        self.model.follow(hybrid_config(self.weights, placement, self.resolved.mixer))

    @functools.cached_property
    def ids(self) -> torch.Tensor:
        """Token ids (B, L) of the calibration text, of which the last `held_out_sequences` rows evaluate the fits."""
        return self.with_recall(self.text.ids) if self.resolved.has_windows else self.text.ids

    @functools.cached_property
    def text(self) -> CalibrationRows:
        """Rows of the calibration text as they stand there."""
        alignment = self.resolved.alignment
        length = self.resolved.sequence_length
        held_out = alignment.held_out_sequences
        num_fitting = max(alignment.tokens // length - held_out, 0)
        if num_fitting < 1:
            raise ValueError(
                f"{alignment.tokens} tokens leave nothing to fit on: {held_out} sequences of {length} tokens are held "
                f"out to evaluate the fit. Give at least {(held_out + 1) * length}."
            )
        return self._reported(self.rows(num_fitting + held_out))

    def _reported(self, rows: CalibrationRows) -> CalibrationRows:
        text = public_name(self.resolved.alignment.text)
        self.report |= {"text": text, "tokens": rows.ids.numel(), "sequence_length": rows.ids.shape[1]}
        return rows

    def rows(self, count: int, at_least: int | None = None) -> CalibrationRows:
        """Read `count` rows of the calibration text, or fewer if the text has only these, down to `at_least`."""
        resolved = self.resolved
        return calibration_rows(
            self.weights.teacher, self.model, resolved.alignment, count, at_least, resolved.seed,
            resolved.trust_remote_code,
        )  # fmt: skip

    def with_recall(self, rows: torch.Tensor) -> torch.Tensor:
        """Make some rows (B, L) of the text ask for recall."""
        return with_recall(rows, plain_tokens(self.model.config.vocab_size), self.resolved.seed, self.text.begin)

    def read_text(self) -> None:
        """Read the calibration text or draw it now, and not when it is first needed."""
        self.progress("reading text, rows", 0, 0)
        rows = len(self.ids)
        self.progress("reading text, rows", rows, rows)

    def fit(self, layers: list[int], settings: FitOptions) -> Fits:
        """Fit mixers for these layers; fits with the same settings are read from the work folder if it holds any."""
        held_out = self.resolved.alignment.held_out_sequences
        memory = self.resolved.alignment.activation_memory
        self._caches.append(self.cache(settings))
        return fit_layers(
            self.model, layers, self.ids, held_out, settings, self._caches[-1], parse_size(memory),
            self.resolved.seed, self.progress, self.work, self.team,
        )  # fmt: skip

    def work_for_first(self) -> Placement:
        """Fit the layers that the first process assigns until it ends the run; return its final placement."""
        while True:
            what, *parts = self.team.wait()
            if what == OVER:
                return parts[0]
            fit_for_first(self.model, *parts, self.team)
            return_free_memory()

    def align(self, plan: Plan) -> Alignment:
        """Fit the mixers of a plan's replaced layers, and the offsets of keys of the others."""
        if not plan.placement.replaced_layers:  # a few rows are enough
            rows = self._reported(self.rows(SEQUENCES + 1))
            return Alignment(self.key_offsets(plan.config, rows.ids), plan.placement, self.report)
        started = time.perf_counter()
        self.follow(plan.placement)
        return_free_memory()  # of the scores
        fits = self.fit(list(plan.placement.replaced_layers), self.resolved.alignment.fit)
        placement = plan.placement
        if placement.hybrid is not None and placement.hybrid.rank:
            errors = {layer: fit.by_rank for layer, (_, fit) in fits.items()}
            # every layer has the mean rank until its errors are known
            sizes = placement.weights_of_a_rank(plan.config)
            ranks = ranks_within(errors, sizes, placement.hybrid.rank * sum(sizes.values()))
            placement = placement.with_ranks(ranks)
            for layer, rank in ranks.items():
                mixer, fit = fits[layer]
                # the map's first rows and columns are the map of that rank, so that nothing is fitted again
                cut_map(mixer, rank)
                fits[layer] = mixer, dataclasses.replace(fit, solved=errors[layer][rank], refined=errors[layer][rank])
            self.report["ranks"] = ranks
        self.report |= {
            "held_out_error": {layer: dataclasses.asdict(fit) for layer, (_, fit) in sorted(fits.items())},
            "fit_seconds": round(time.perf_counter() - started),
        }
        tensors = {
            f"model.layers.{layer}.mixer.{name}": tensor.detach().cpu()
            for layer, (mixer, _) in fits.items()
            for name, tensor in mixer.state_dict().items()
        } | self.key_offsets(plan.config, self.ids[: SEQUENCES + 1])
        return Alignment(tensors, placement, self.report)

    def key_offsets(self, config: PreTrainedConfig, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Measure the offsets of keys of the layers that keep their attention; tensors of the hybrid by name.

        Args:
            ids: (B, L) of text, of which the last row is not used.
        """
        names = {name: int(name.split(".")[2]) for name in tensor_shapes(config) if name.endswith(KEPT_OFFSET)}
        offsets = {}
        if not names:
            return offsets
        layers = range(max(names.values()) + 1)
        memory = parse_size(self.resolved.alignment.activation_memory)
        with contextlib.closing(ActivationStream(self.model, ids, 1, memory, self.work)) as stream:
            for layer in layers:
                self.progress("measuring keys, layers", layer, len(layers))
                data = stream.attention_data(layer)
                if (name := f"model.layers.{layer}.{KEPT_OFFSET}") in names:
                    offsets[name] = offset_on(self.model.block(layer).attention, data).cpu()
        self.progress("measuring keys, layers", len(layers), len(layers))
        return offsets

    def finished(self) -> None:
        """Delete the fits that were kept for a resumption; call this once OUT is in place."""
        for cache in self._caches:
            cache.drop()

    def cache(self, settings: FitOptions) -> FitCache:
        """Open the cache of the fits that depend on these settings and on the kind of mixer."""
        config = self.model.mixer_config.to_dict()
        # by size and time, since hashing reads every byte of the weights
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.weights.checkpoint.files]
        key = {
            "teacher": [self.weights.teacher.public_name, self.weights.teacher.revision, files],
            "mixer": {k: v for k, v in config.items() if k.startswith(("mixer", "hybrid")) or k.endswith("_bits")},
            "text": [list(self.ids.shape), hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()],
            "held_out": self.resolved.alignment.held_out_sequences,
            "fit": differences(settings),
            "initial_decay": self.resolved.initial_decay,
            "seed": self.resolved.seed,
            "context": self.resolved.context,
            "version": project_version(),
        }
        return FitCache(self.work, key)
