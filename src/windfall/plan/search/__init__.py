"""From a cluster and a workload to a list of plans.

request      what is asked: cluster, workload, objective, limits
solvers      phase 1: counts per type and parallelism, exactly or as a mixed-integer program
partition    phase 2: which individual GPUs, by links
scoring      a placed plan with its predicted times and costs
planner      both phases, improvement, and the list of plans
"""
