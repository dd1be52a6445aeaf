"""Several ranks of a trainer on CPUs."""
