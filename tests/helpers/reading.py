"""A text through a model and its cache, partly at once and partly token by token."""

import torch


def read(model, ids, cache=None):
    """Logits after each token, the first half at once and the others one by one; the cache."""
    half = ids.shape[1] // 2
    logits = []
    for part in (ids[:, :half], *ids[:, half:].split(1, dim=1)):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache
