"""Peak bytes of training and of decoding on one device, by formula, for teachers of 1B, 8B and 70B.

    python -m recipes.benchmarks.device_memory

The numbers in the formulas are those that the stand-in device counted on small models (tests/device/test_memory.py
compares, within a tenth): attention by PyTorch's own operations. flex_attention, which a GPU has, keeps no scores.

Shapes as in modeling_llamba/hybrid/hybrid_attention.py; T tokens of a batch, I width of the MLP, V vocabulary.
"""

import math

from convert.hybrids.shapes import tensor_shapes
from convert.io.writer import human_bytes
from convert.layout.cache import CACHE_DTYPE, cache_bytes
from convert.options import DEFAULT_CACHE, PlacementOptions
from convert.train.distillation.loss import CHUNK_ELEMENTS
from modeling_llamba import LlambaConfig
from modeling_llamba.hybrid.block_layout import GROUP
from modeling_llamba.hybrid.eviction import BlockShape
from modeling_llamba.hybrid.rounding import DECODED, Rounding

from .gpu import default_hybrid

SHAPES = {
    "1B": (2048, 8192, 16, 32, True),
    "8B": (4096, 14336, 32, 32, False),
    "70B": (8192, 28672, 80, 64, False),
}
"""Width, width of the MLP, layers, heads, and whether the embedding is the head, of Llama 3."""
SEQUENCES, CONTEXT = (1, 8, 64), 32768
LENGTH = 2048


def shape_of(name: str) -> LlambaConfig:
    """The default hybrid of a teacher of this size, with as many kept heads as its cache has room for."""
    width, intermediate, layers, heads, tied = SHAPES[name]
    config = default_hybrid(
        {
            "vocab_size": 128256, "hidden_size": width, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "tie_word_embeddings": tied,
        }
    )  # fmt: skip
    config.conversion = {"teacher_layer_types": ["full_attention"] * layers}
    shared = heads // 8
    config.hybrid_full_heads = [[] for _ in range(layers)]
    for kept in range(8 * layers):
        whole, own = cache_bytes(config, PlacementOptions.context)
        if own > DEFAULT_CACHE * whole:
            break
        # in every second layer, since heads that look up distant tokens lie together
        config.hybrid_full_heads[2 * kept % layers].extend(
            range(kept * 2 // layers * shared, (kept * 2 // layers + 1) * shared)
        )
    return config


def parameters(config: LlambaConfig) -> int:
    """Number of a model's weights."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def training_bytes(config: LlambaConfig, teacher: int, sequences: int, length: int) -> int:
    """Peak of `recipes.sft` with a teacher in bfloat16, autocast to bfloat16 and gradient checkpointing.

    Weights, gradients and AdamW's two moments in float32, the teacher, each layer's input; and the largest of what
    the attention of one layer, its MLP, or a chunk of logits takes.

    Args:
        teacher: number of its weights.
    """
    M, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    T, V, P = sequences * length, config.vocab_size, parameters(config)
    shape = BlockShape.of(config, config.layer_types.index("hybrid"))
    columns = shape.places + shape.window + GROUP
    scores = sequences * max(length - shape.window, 0) * H * columns
    attention = 4 * P + T * (4 * M + 4 * H * D + 40 * K * D) + 18.5 * scores
    mlp = 4 * P + T * (16 * config.intermediate_size + 4 * M)
    logits = 28 * T * V if T * V <= CHUNK_ELEMENTS else 32 * CHUNK_ELEMENTS
    head = logits + 6 * V * M  # before there are any gradients
    return round(12 * P + 2 * teacher + 4 * T * M * config.num_hidden_layers + max(attention, mlp, head))


def decoding_bytes(config: LlambaConfig, sequences: int, context: int) -> int:
    """Peak of a step of sequences that hold `context` tokens each: weights and cache in bfloat16 or in few bits.

    Beside these, in the layer with the most heads of full attention, the new rows of keys or values, which are made
    before the old ones are let go, and the numbers that are taken out of them for some heads at a time.
    """
    D, shared = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    heads = []
    for layer, kind in enumerate(config.layer_types):
        kept = len(config.full_heads_of(layer)) // shared if kind == "hybrid" else config.num_key_value_heads
        heads.append(kept)
    of_head = sequences * context * D
    at_once = min(max(heads), max(DECODED // of_head, 1))
    rounding = Rounding.of_pair(config.full_attention_bits, D)
    rows = max(heads) * sequences * context * max(part.width(CACHE_DTYPE) for part in rounding)
    taken_out = 0
    if any(part.rounds for part in rounding):
        # keys in bfloat16, values in float32 and bfloat16, and of fewer bits than 8 the codes
        taken_out = (8 if rounding[1].bits == 8 else 9) * of_head * at_once
    return round(2 * parameters(config) + sequences * cache_bytes(config, context)[1] + rows + taken_out)


def main() -> None:
    """Print training and decoding of all shapes."""
    print(f"GB of one device: weights; a step of SFT on 1 and 8 sequences of {LENGTH:,} tokens, whole; a token of")
    print(f"{', '.join(map(str, SEQUENCES))} sequences of {CONTEXT:,} tokens; bytes of one sequence's cache")
    for name in SHAPES:
        config = shape_of(name)
        found = [training_bytes(config, parameters(config), n, LENGTH) for n in (1, 8)]
        found += [decoding_bytes(config, n, CONTEXT) for n in SEQUENCES]
        figures = [human_bytes(size) for size in [2 * parameters(config), *found, cache_bytes(config, CONTEXT)[1]]]
        print(f"{name:4}", *(f"{figure:>10}" for figure in figures))


if __name__ == "__main__":
    main()
