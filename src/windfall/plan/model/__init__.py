"""What is planned with.

devices      what a GPU can do and what it costs, with sources
cluster      machines, their GPUs and links
workload     what a step of the run asks for
cost_model   seconds of a training step, of a replica's decode step, of a weight update; memory
inputs       the workload of a recipe
"""
