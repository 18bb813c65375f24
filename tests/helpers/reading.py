"""A text through a model and its cache, partly at once and partly token by token."""

import torch

from modeling_llamba.compatibility import CACHE_NAME, cache_of


def read(model, ids, cache=None):
    """Logits after each token, the first half at once and the others one by one; the cache."""
    half = ids.shape[1] // 2
    logits = []
    for part in (ids[:, :half], *ids[:, half:].split(1, dim=1)):
        out = model(part, use_cache=True, **{CACHE_NAME: cache})
        cache = cache_of(out)
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache
