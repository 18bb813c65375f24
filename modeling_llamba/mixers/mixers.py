"""The mixers by the name that a configuration has for each."""

from .mamba1 import Mamba1
from .mamba2 import DiscreteMamba2, Mamba2

MIXERS = {"discrete_mamba2": DiscreteMamba2, "mamba2": Mamba2, "mamba1": Mamba1}
