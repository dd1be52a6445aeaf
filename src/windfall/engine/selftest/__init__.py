"""The self-test: before windfall runs a model, it compares itself with transformers on a small one of the same
architecture, and refuses the model if the results differ by more than rounding.

    check_engine (verdict.py)              called where an engine is built; remembers what passed
      └─▶ judge_engine (judge.py)            decides: compares the measured differences with the limits
            ├─▶ build_small_model (small_model.py)   a small random model, twice: for windfall and as the reference
            │     └─▶ small_configs (shrink.py)        smaller configurations of the same architecture
            ├─▶ engine_difference (compare.py)       measures log-probs
            └─▶ batch_invariant, neighbor_dependence (determinism.py)   only if run.deterministic is set
    check_trainer (trainer/selftest.py)    the same for the log-probs and gradients of the trainer
    check_weights (verdict.py) ─▶ weights_difference (compare.py)   the loaded weights, with a few tokens
"""
