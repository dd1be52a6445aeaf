"""Kernels can be imported only where triton is, and there is none without a GPU."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/windfall/*/kernels/*", "src/windfall/*/*/kernels/*"]
