"""Options of `compare`, apart from what runs it, whose imports take seconds."""

import itertools
from dataclasses import dataclass

from convert.options import Context, NonNegativeInt, PositiveInt

NEEDLE = 8
"""Tokens of a needle, as in evaluation/recall.py."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Measure hybrids beside their teacher and beside other ways to shrink its key/value cache.

    These are rounding to few bits, a window (the first and the latest tokens), and eviction (of tokens that matter
    least). After an interruption, run the same command again.
    """

    teacher: str | None = None
    """Folder, GGUF file or Hub id of the model that hybrids were made from."""
    hybrids: tuple[str, ...] = ()
    """Folders or Hub ids of hybrids; a window and an eviction of the same bytes are measured beside each."""
    output: str = "runs/compare"
    """Folder for compare.json, compare.md and compare.png."""
    text: tuple[str, ...] = ("shipped", "python-docs", "python-code")
    """Texts to judge on, with commas between them: shipped, python-docs, python-code, files, or data sets of the Hub
    as NAME:CONFIG:SPLIT (allenai/c4:en:validation, say)."""
    quick: bool = False
    """Read one row of 2,048 tokens of each text and skip the longest context of speed: minutes on a laptop."""
    length: Context = 4096
    """Number of tokens of a row, the piece of text that models read at once."""
    rows: PositiveInt = 2
    """Number of rows of each text."""
    first: Context = 512
    """First position that is judged. Eviction is judged after contexts of as many tokens, of twice as many, and so
    on."""
    needle_rows: PositiveInt = 4
    """Number of texts in which needles, random tokens that are asked for at the end, are hidden at several distances;
    with 26 the standard error is 4 percentage points."""
    needles: tuple[PositiveInt, ...] = (100, 400, 1500, 3500, 7500, 15000, 30000)
    """Numbers of tokens, with commas between them, from which needles are asked back. Those that a row is too short
    for are left out."""
    speed: tuple[PositiveInt, ...] = (512, 4096, 16384)
    """Numbers of tokens at which speed is measured, with commas between them."""
    ruler: tuple[PositiveInt, ...] = ()
    """Numbers of tokens, with commas between them, at which the tasks of RULER, a test of long contexts, are run (not
    for eviction); hours on a CPU."""
    ruler_rows: PositiveInt = 8
    """Number of rows of each of RULER's tasks."""
    continuations: NonNegativeInt = 0
    """Number of pieces of each text, of `--first` tokens, after which each cache generates 64 tokens, to be compared
    with the teacher's. Eviction and caches of libraries are left out."""
    dtype: str = "float32"
    """Type of the weights in memory: auto, float32, bfloat16 or float16."""
    real: bool = False
    """Measure caches of few bits that libraries have, too: transformers' fp8, quanto and HQQ, and llama.cpp's where
    the teacher is a GGUF file; needs the extra `rivals`."""
    beside: tuple[str, ...] = ("int8", "int4", "int3", "int2", "window", "eviction")
    """Emulated caches to measure beside teacher and hybrids, with commas between them; [] for none. Without eviction,
    which reads each context once more, a comparison is much shorter."""
    html: str | None = None
    """File for a page of tables and pictures, which opens without a network. For it each model goes on with each text,
    too."""
    device: str = "cpu"
    """Device to run on: cpu or cuda."""
    trust_remote_code: bool = False
    """Run the code that a repository brings along."""

    def __post_init__(self):
        known = CompareOptions.beside
        unknown = [name for name in self.beside if name not in known]
        if unknown:
            raise ValueError(f"--beside takes some of {', '.join(known)}; got {', '.join(unknown)}.")
        if self.length < 2 * self.first:
            raise ValueError(f"--length must be at least twice --first, {2 * self.first} tokens.")
        # needles and questions for them may not overlap
        gaps = [after - before for before, after in itertools.pairwise((0, *self.needles))]
        least = NEEDLE * len(self.needles)
        if not gaps or min(gaps) < least:
            raise ValueError(f"--needles must grow from {least} tokens on by at least {least}.")
