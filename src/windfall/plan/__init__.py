"""Plans a run before it is paid for: which GPUs train, which generate, and what that should yield and cost.

    devices      what a GPU can do and what it costs, with sources
    cluster      machines, their GPUs and links
    workload     what a step of the run asks for
    cost_model   seconds of a training step, of a replica's decode step, of a weight update; memory
    measured     the cost model fitted to this project's figures of an H200, and its held-out error
    search       phase 1: counts per type and parallelism, exactly or as a mixed-integer program
    partition    phase 2: which individual GPUs, by links
    planner      both phases, checks, and the list of plans
    recipe       from a plan to a recipe that runs, and to a simulation of it
    replan       advice during a run, with hysteresis
    review       a plan beside the log of its run
    command      `windfall plan`

Imports point down this list. Nothing but the command line imports this package. Method: AReaL-Hex (arXiv 2511.00796).
"""
