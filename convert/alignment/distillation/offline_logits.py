"""The teacher's likeliest next tokens for a prepared data set, computed once, kept on disk, used in every epoch.

4 to 6 bytes per token and outcome: 64 outcomes of 100 million tokens take 26 to 38 GB. Parts are written whole, so an
interrupted run goes on where it was.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm

from .loss import IGNORED, TopK

ROWS_PER_PART = 256
ROW = "teacher_row"
PACKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def teacher_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a student's batch that any Transformer takes; a sequence index is for recurrent layers alone."""
    return {key: batch[key] for key in ("input_ids", "attention_mask", *PACKED) if key in batch}


@torch.no_grad()
def final_hidden(teacher: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The teacher's states (B, L, D) after its final norm."""
    return teacher.base_model(**teacher_inputs(batch), use_cache=False).last_hidden_state


class OfflineLogits:
    """Top-K log-probabilities of every counting position of every row.

    Args:
        folder: holds the parts, in a subfolder for each combination of data, teacher and K.
        k: number of tokens to keep per position.
    """

    def __init__(self, folder: Path, k: int):
        self.folder, self.k = folder, k
        self.rows: list[TopK] = []

    def add(self, dataset: Any, teacher: nn.Module, collate: Callable[[list], dict], what: str) -> Any:
        """The data set with a column that finds each row's figures again, computed where they are not on disk yet."""
        first = len(self.rows)
        folder = self.folder / key_of(dataset, teacher, self.k)[:16]
        folder.mkdir(parents=True, exist_ok=True)
        state, starts = PartialState(), range(0, len(dataset), ROWS_PER_PART)
        paths = [folder / f"part-{number:05d}.safetensors" for number in range(len(starts))]
        left = [(start, path) for start, path in zip(starts, paths, strict=True) if not path.is_file()]
        own = left[state.process_index :: state.num_processes]  # `left` is the same for all until they meet again
        state.wait_for_everyone()
        for start, path in tqdm(own, desc=f"teacher's logits, {what}", leave=False):
            rows = [dataset[i] for i in range(start, min(start + ROWS_PER_PART, len(dataset)))]
            self._write(path, [self._row(row, teacher, collate) for row in rows])
        state.wait_for_everyone()
        for path in paths:
            part = load_file(path)
            counts = part["counts"].tolist()
            ids, log_probs = part["ids"].split(counts), part["log_probs"].split(counts)
            self.rows += [TopK(i, p) for i, p in zip(ids, log_probs, strict=True)]
        return dataset.add_column(ROW, list(range(first, first + len(dataset))))

    def __getitem__(self, rows: Iterable[int]) -> TopK:
        """The figures of several rows, one after the other."""
        chosen = [self.rows[row] for row in rows]
        ids = torch.cat([row.ids for row in chosen])
        ids = ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()
        return TopK(ids, torch.cat([row.log_probs for row in chosen]).float())

    @torch.no_grad()
    def _row(self, row: dict, teacher: nn.Module, collate: Callable[[list], dict]) -> TopK:
        batch = {k: v.to(teacher.device) if torch.is_tensor(v) else v for k, v in collate([row]).items()}
        counts = batch["labels"][:, 1:] != IGNORED
        hidden = final_hidden(teacher, batch)[:, :-1][counts]
        log_probs = teacher.get_output_embeddings()(hidden).float().log_softmax(-1)
        values, ids = log_probs.topk(self.k, -1)
        return TopK(ids.to(id_type(log_probs.shape[-1])).cpu(), values.half().cpu())

    @staticmethod
    def _write(path: Path, rows: list[TopK]) -> None:
        partial = path.with_suffix(f".partial-{os.getpid()}")
        tensors = {
            "counts": torch.tensor([len(row.ids) for row in rows]),
            "ids": torch.cat([row.ids for row in rows]),
            "log_probs": torch.cat([row.log_probs for row in rows]),
        }
        save_file(tensors, partial)
        partial.rename(path)


def id_type(vocabulary: int) -> torch.dtype:
    """The narrowest integer that holds every token id; of int16 all bits, as torch's uint16 knows few operations."""
    return torch.int16 if vocabulary <= 2**16 else torch.int32


def key_of(dataset: Any, teacher: nn.Module, k: int) -> str:
    """A hash of everything the figures depend on: the rows, the teacher and K."""
    digest = hashlib.sha256(f"{k} {type(teacher).__name__}".encode())
    for name, parameter in teacher.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.detach().flatten()[:16].tolist()}".encode())
    for row in dataset:
        digest.update(repr([row["input_ids"], row.get("labels"), row.get("seq_lengths")]).encode())
    return digest.hexdigest()


class WithTeacherRows:
    """A collator that also says which rows a batch holds."""

    def __init__(self, collate: Callable[[list], dict]):
        self.collate = collate

    def __call__(self, rows: list[dict]) -> dict:
        batch = self.collate([{k: v for k, v in row.items() if k != ROW} for row in rows])
        if ROW in rows[0]:
            batch[ROW] = torch.tensor([row[ROW] for row in rows])
        return batch
