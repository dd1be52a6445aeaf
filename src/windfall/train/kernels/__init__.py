"""The functions of layers.py in Triton, for a GPU: each reads and writes every number once. Importable where triton is.

Where gradients of a weight are to be summed over tokens, every program writes its own partial sum, so that the result
does not depend on who was quick.
"""

from windfall.train.kernels.logprobs import score, score_back
from windfall.train.kernels.norm import norm, norm_back
from windfall.train.kernels.rotary import turn, turn_back
from windfall.train.kernels.swiglu import gate, gate_back

__all__ = ["gate", "gate_back", "norm", "norm_back", "score", "score_back", "turn", "turn_back"]
