"""The functions of layers.py in Triton, for a GPU: each reads and writes every value once. Needs triton to import.

Where the gradient of a weight is a sum over tokens, every program writes its own partial sum, so that the result does
not depend on the order in which programs finish.
"""

from windfall.trainer.kernels.layers import (
    apply_swiglu,
    apply_swiglu_backward,
    rms_norm,
    rms_norm_backward,
    token_logprobs,
    token_logprobs_backward,
)
from windfall.trainer.kernels.rotary import apply_rotary, apply_rotary_backward

__all__ = [
    "apply_rotary",
    "apply_rotary_backward",
    "apply_swiglu",
    "apply_swiglu_backward",
    "rms_norm",
    "rms_norm_backward",
    "token_logprobs",
    "token_logprobs_backward",
]
