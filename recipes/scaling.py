"""Tokens per second, memory and cost of distilling larger models: the table in docs/scaling.md, from arithmetic.

python -m recipes.scaling [--utilisation 0.4] [--peak 989e12] [--price 2.5] [--tokens 1e9]
"""

import argparse
from dataclasses import dataclass

GIB = 2**30
SEQUENCE = 2048
SEQUENCES_PER_GPU = 2
CHUNK_BYTES = 6 * 4 * 2**23
OFFLINE_BYTES_PER_OUTCOME = {True: 4, False: 6}
"""A token id (2 or 4 bytes, whether the vocabulary fits in 16 bits) and a half-precision log-probability."""


@dataclass(frozen=True)
class Shape:
    """A Llama, from its published configuration."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool
    gpus: int

    @property
    def parameters(self) -> int:
        """Of the teacher."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.width * self.mlp + 2 * self.width
        return self.layers * block + (1 if self.tied else 2) * self.vocabulary * self.width + self.width

    @property
    def student_parameters(self) -> int:
        """Half of the layers a mixer: a gate of the width, a decay per head, a convolution and biases more."""
        inner = self.width
        channels = inner + 2 * inner * self.kv_heads // self.heads
        more = self.width * (inner + self.heads) + 5 * channels + 2 * inner + 2 * self.heads
        return self.parameters + self.layers // 2 * more


SHAPES = (
    Shape("1B (Llama-3.2-1B)", 128256, 2048, 16, 32, 8, 8192, True, 8),
    Shape("8B (Llama-3.1-8B)", 128256, 4096, 32, 32, 8, 14336, False, 8),
    Shape("70B (Llama-3.1-70B)", 128256, 8192, 80, 64, 8, 28672, False, 64),
)


def operations_per_token(shape: Shape) -> int:
    """Forward, backward and recomputation of the student, forward of the teacher."""
    return (6 + 2) * shape.student_parameters + 2 * shape.parameters


def bytes_per_gpu(shape: Shape) -> float:
    """FSDP2: 16 bytes a trained parameter and 2 of the teacher over all GPUs, activations, the loss's chunk."""
    shared = (16 * shape.student_parameters + 2 * shape.parameters) / shape.gpus
    kept = (shape.layers + 16) * SEQUENCES_PER_GPU * SEQUENCE * shape.width * 2
    gathered = 2 * 2 * (shape.student_parameters - 2 * shape.vocabulary * shape.width) / shape.layers
    head = 4 * shape.vocabulary * shape.width + 4 * shape.vocabulary * shape.width
    return shared + kept + gathered + head + CHUNK_BYTES


def table(utilisation: float, peak: float, price: float, tokens: float) -> list[str]:
    """Markdown rows."""
    rows = [
        "| teacher | parameters, student's | operations a token | GPUs | tokens/s | GiB a GPU | hours | cost, $ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        speed = utilisation * peak * shape.gpus / operations_per_token(shape)
        hours = tokens / speed / 3600
        rows.append(
            f"| {shape.name} | {shape.parameters / 1e9:.2f}B, {shape.student_parameters / 1e9:.2f}B | "
            f"{operations_per_token(shape) / 1e9:.1f}e9 | {shape.gpus} | {speed:,.0f} | "
            f"{bytes_per_gpu(shape) / GIB:.0f} | {hours:.1f} | {hours * shape.gpus * price:,.0f} |"
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of the peak that training reaches")
    parser.add_argument("--peak", type=float, default=989e12, help="operations per second of a GPU in bf16, dense")
    parser.add_argument("--price", type=float, default=2.5, help="dollars per GPU and hour")
    parser.add_argument("--tokens", type=float, default=1e9)
    print("\n".join(table(**vars(parser.parse_args()))))
