"""The self-test: before windfall runs a model, it compares itself with transformers on a small one of the same
architecture, and refuses the model if the results differ by more than rounding. verdict.py begins the tests and
remembers what passed; small_model.py builds the model from a configuration of shrink.py; judge.py compares and decides.
"""
