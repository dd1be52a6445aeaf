"""Programs that measure windfall: `python benchmarks/FOLDER/NAME.py --help`.

engine    token generation, beside its peers
train     the trainer, its ranks, and whole runs
fleet     workers that come and go, the controller, weights, and plans
serve     serving, and rollout on serving GPUs
papers    the evaluations of published systems, beside their figures
support   what these programs share, and the processes that they start
"""
