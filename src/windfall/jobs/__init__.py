"""Several jobs on one fleet: `windfall up` is a service that runs them; they share its devices by turns (turns/)."""
