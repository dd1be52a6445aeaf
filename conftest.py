"""Kernels can be imported only where triton is, and there is none without a GPU. Tests compute with one thread."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/windfall/*/kernels.py", "src/windfall/*/*/kernels/*"]

# Test processes run beside each other. With more threads than cores they would spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
