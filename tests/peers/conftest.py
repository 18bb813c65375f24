"""The suites of transformers and peft on our models; collected by `make test-peers` alone."""

import os
import sys

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import modeling_llamba  # noqa: F401  registers the classes
import modeling_phimamba  # noqa: F401

from .fetch import FOLDER

collect_ignore_glob = [] if os.environ.get("PEERS") else ["test_*.py"]
# the suite knows base models, which have no loss, by these names
MODEL_MAPPING_NAMES |= {"llamba": "LlambaModel", "phimamba": "PhiMambaModel"}
sys.path += [str(FOLDER), str(FOLDER / "site")]
