"""The kernels of the GPU engine, in Triton: the functions of `windfall.engine.gpu.reference`, by the same names.
Importable only where triton is."""

from windfall.engine.gpu.kernels.attention import decode, place_and_decode
from windfall.engine.gpu.kernels.draw import draw
from windfall.engine.gpu.kernels.layers import begin, gate, norm, place
from windfall.engine.gpu.kernels.prefill import attend
from windfall.engine.gpu.splits import splits_for

__all__ = ["attend", "begin", "decode", "draw", "gate", "norm", "place", "place_and_decode", "splits_for"]
