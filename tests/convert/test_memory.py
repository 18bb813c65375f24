"""What the C library does with freed memory."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from convert.memory import keep_free_memory
if sys.argv[1] == "keep":
    keep_free_memory()
for _ in range(5):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_pages_of_freed_matrices_are_not_cleared_again():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("as it is") / 4
