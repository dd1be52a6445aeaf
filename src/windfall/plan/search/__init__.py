"""From a cluster and a workload to a list of plans.

plan         what is asked, and a placed plan with its predicted times and costs
frontier     phase 1: counts per kind and size, from the frontier of speed and price
partition    phase 2: which individual GPUs, by links
planner      both phases, improvement, and the list of plans
"""
