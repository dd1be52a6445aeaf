"""Plans and runs.

recipe       from a plan to a recipe that runs, and to a simulation of it
run_log      measured times and lengths from the log of a run
review       a plan beside the log of its run
replan       when to advise another plan, with hysteresis
live         advice during a run
"""
