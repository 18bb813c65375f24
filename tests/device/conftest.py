"""Nothing here is collected where there is no stand-in for a CUDA device."""

from tests.doubles.device.native import can_stand_in

collect_ignore_glob = [] if can_stand_in() else ["test_*.py"]
