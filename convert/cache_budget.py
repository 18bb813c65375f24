"""A conversion that keeps within so many bytes of cache."""

import dataclasses

from .cache_size import cache_bytes
from .checkpoint import Checkpoint
from .config import ConversionConfig, parse_size
from .plan import human_bytes, output_dtype, replacement_type, student_config
from .teacher import Teacher


def with_cache_budget(options: ConversionConfig, teacher: Teacher, checkpoint: Checkpoint) -> ConversionConfig:
    """The options with `cache_bytes` turned into the largest share of attention layers that keeps within it.

    Raises:
        ValueError: not even the recurrent states fit.
    """
    if options.cache_bytes is None:
        return options
    options, budget = dataclasses.replace(options, cache_bytes=None, attention_ratio=0.0), options.cache_bytes
    config = student_config(teacher, options)
    dtype, kinds = output_dtype(options.dtype, checkpoint.tensors), config.conversion["teacher_layer_types"]
    for count in range(len(kinds), -1, -1):
        # the layers that keep most are counted, so that whichever are chosen, the budget holds
        kept = sorted(kinds)[:count]
        config.layer_types = [*kept, *[replacement_type(options)] * (len(kinds) - count)]
        if cache_bytes(config, options.context, dtype)[1] <= parse_size(budget):
            return dataclasses.replace(options, attention_ratio=count / len(kinds))
    need = human_bytes(cache_bytes(config, options.context, dtype)[1])
    raise ValueError(
        f"cache_bytes {budget} is too little: the mixers' states alone take {need}; give more or a smaller d_state."
    )
