#!/usr/bin/env bash
# torch 2.13.0: on a CPU a process grows with each new length of its input, as if it leaked, until it has seen 1,024.
# oneDNN keeps what it compiles for a shape, for the last 1,024 shapes, and counts no bytes. Nothing of it is a tensor,
# a Python object, or memory that malloc_trim gives back. ONEDNN_PRIMITIVE_CACHE_CAPACITY bounds it.
#
# Seen (a convolution of 256 channels, one thread): 256 MiB more after inputs of 1 to 1,000 steps, none after the same
# again, none after 1,001 to 2,000. With a capacity of 8 it was 29 MiB.
# Why one would guess otherwise: all inputs are freed, a second pass over the same lengths adds nothing, and a server's
# memory that grows by a tenth of a MiB with a request of a new length looks like a leak of the request's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/grow.py" <<'PY'
from pathlib import Path

import torch


def held():
    """MiB that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


torch.set_num_threads(1)
layer = torch.nn.Conv1d(256, 256, 3, padding=1)
sizes = []
with torch.inference_mode():
    layer(torch.zeros(1, 256, 2000))
    for lengths in (range(1, 1001), range(1, 1001), range(1001, 2001)):
        before = held()
        for length in lengths:
            layer(torch.zeros(1, 256, length))
        sizes.append(round(held() - before))
print(*sizes)
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
read -r first again further < <("$folder/venv/bin/python" "$folder/grow.py")
read -r bounded _ < <(ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 "$folder/venv/bin/python" "$folder/grow.py")
echo "torch 2.13.0: MiB more after 1,000 lengths $first, after these again $again, after 1,000 others $further"
echo "with ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 MiB more after 1,000 lengths $bounded"
((first > 50 && again < first / 4 && further < first / 4 && bounded < first / 4))
