"""The suites of transformers and peft on our models; collected by `make test-peers` alone."""

import os
import re
import sys

import peft.utils.constants as peft_constants
import pytest
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import modeling_llamba  # noqa: F401  registers the classes
import modeling_phimamba  # noqa: F401

from .fetch import FOLDER
from .known import PEFT, known_of

collect_ignore_glob = [] if os.environ.get("PEERS") else ["test_*.py"]
if os.environ.get("PEERS"):  # an ordinary run imports this file, too
    # the suite knows base models, which have no loss, by these names
    MODEL_MAPPING_NAMES |= {"llamba": "LlambaModel", "phimamba": "PhiMambaModel"}
    sys.path += [str(FOLDER), str(FOLDER / "site")]

    # PEFT has no default targets for these models; Llama's, and the projections of mixers
    for name, targets in vars(peft_constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "llama" in targets:
            of_llama = targets["llama"]
            more = ["in_proj"] if "q_proj" in of_llama and isinstance(of_llama, list) else []
            targets |= dict.fromkeys(("llamba", "phimamba"), of_llama + more if more else of_llama)


def pytest_collection_modifyitems(items) -> None:
    """Mark tests of PEFT that are known to fail on a shape, and those of other models, which come from a hub."""
    for item in items:
        if shape := re.search(r"runs/peers/models/(\w+)\]", item.name):
            if (reason := known_of(shape[1], item.name, PEFT)) is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        elif item.path.name == "test_peft.py":
            item.add_marker(pytest.mark.skip(reason="a model of a hub, none of our shapes"))
