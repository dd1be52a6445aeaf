"""Plans a run before it is paid for: which GPUs train, which generate, and what that should yield and cost.

    model/       devices: what a GPU can do and what it costs; cluster: machines and links; workload: what a step asks
                 for; cost_model: seconds and bytes of training, decoding and weight updates
    search/      frontier: counts per kind and size; partition: which individual GPUs; plan: what is asked, and a placed
                 plan with its predicted times and costs; planner: all of it, improvement, and the list of plans
    run/         recipe: from a recipe to its workload, from a plan to a recipe that runs and to a simulation of it;
                 run_log: measured times, and a plan beside the log of its run
    choose       which plan to choose, by simulation
    options, command, report    `windfall plan`

Imports point down this list. Nothing but the command line imports this package. Method: AReaL-Hex (arXiv 2511.00796).
"""
