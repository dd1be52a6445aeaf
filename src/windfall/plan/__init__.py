"""Plans a run before it is paid for: which GPUs train, which generate, and what that should yield and cost.

    model/       what is planned with: devices, clusters, workloads, and the cost model
    search/      from a cluster and a workload to a list of plans
    run/         from a plan to a recipe that runs, to a simulation of it, and to advice and review of the run
    choose       which plan to choose, by simulation
    options, command, report    `windfall plan`

Imports point down this list. Nothing but the command line imports this package. Method: AReaL-Hex (arXiv 2511.00796).
"""
