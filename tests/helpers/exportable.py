"""A hybrid that other architectures can hold."""

HOLDABLE = dict(
    mixer="mamba2", mixer_norm="head", mixer_activation="silu", mixer_rotary=False, mixer_decay_bias=False,
    sliding_window=None, hybrid_full_heads=None,
)  # fmt: skip
