"""The Triton kernels of the GPU engine. They have the names, signatures and results of the functions in
tests/support/engines/reference_kernels.py. This package can be imported only where triton is installed."""

from windfall.engine.cuda.kernels.adapters import add_adapters, add_adapters_in_place, add_adapters_swiglu, group_rows
from windfall.engine.cuda.kernels.decode import decode_attention, rope_store_and_decode
from windfall.engine.cuda.kernels.drafts import accept, decode_inputs, find_matches
from windfall.engine.cuda.kernels.layers import add_rms_norm, rope_and_store, swiglu
from windfall.engine.cuda.kernels.prefill import prefill_attention
from windfall.engine.cuda.kernels.sampling import sample
from windfall.engine.cuda.splits import splits_for

__all__ = [
    "accept",
    "add_adapters",
    "add_adapters_in_place",
    "add_adapters_swiglu",
    "add_rms_norm",
    "decode_attention",
    "decode_inputs",
    "find_matches",
    "group_rows",
    "prefill_attention",
    "rope_and_store",
    "rope_store_and_decode",
    "sample",
    "splits_for",
    "swiglu",
]
