"""The self-test: before windfall runs a model, it compares itself with transformers on a small one of the same
architecture, and refuses the model if the results differ by more than rounding.

    check_engine, check_trainer (verdict.py)     called where an engine or a trainer is built; remember what passed
      └─▶ judge_engine, judge_trainer (judge.py)   decide: compare the measured differences with the limits
            ├─▶ build_small_model (small_model.py)   a small random model, twice: for windfall and as the reference
            │     └─▶ small_configs (shrink.py)        smaller configurations of the same architecture
            ├─▶ engine_difference, trainer_differences (compare.py)   measure log-probs and gradients
            └─▶ batch_invariant, neighbor_dependence (determinism.py)   only if run.deterministic is set
    check_weights (verdict.py) ─▶ weights_difference (compare.py)   the loaded weights, with a few tokens
"""
