"""Plans and runs.

recipe       from a plan to a recipe that runs, and to a simulation of it
run_log      measured times and lengths from the log of a run; a plan beside the log of its run
advice       whether another plan has become better for a run
"""
