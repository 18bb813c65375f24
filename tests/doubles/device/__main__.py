"""Run a module on the stand-in device: python -m tests.doubles.device MODULE ARGUMENTS ..."""

import runpy
import sys

from . import StandIn

if __name__ == "__main__":
    module, *sys.argv[1:] = sys.argv[1:]
    with StandIn():
        runpy.run_module(module, run_name="__main__", alter_sys=True)
