"""The kernels of the GPU engine, in Triton: the functions of `windfall.engine.cuda.reference`, by the same names.
Importable only where triton is."""

from windfall.engine.cuda.kernels.attention import decode, place_and_decode
from windfall.engine.cuda.kernels.layers import begin, gate, norm, place
from windfall.engine.cuda.kernels.prefill import attend
from windfall.engine.cuda.kernels.sampling import draw
from windfall.engine.cuda.splits import splits_for

__all__ = ["attend", "begin", "decode", "draw", "gate", "norm", "place", "place_and_decode", "splits_for"]
